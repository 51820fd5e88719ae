import sys
from typing import Any

import pytest
import torch

from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.data.text import (
    IGNORED_TARGET,
    CharVocabulary,
    PythonDocs,
    TextDataset,
    load_python_docs,
    python_docs_vocabulary,
)

VOCABULARY = CharVocabulary("hello world")


@pytest.fixture
def own_topics(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the topics of this Python."""

    def replace(topics: dict[str, str]) -> None:
        module = type(sys)("pydoc_data.topics")
        module.topics = topics  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)
        load_python_docs.cache_clear()

    yield replace
    load_python_docs.cache_clear()


def test_the_documentation_is_long_and_a_tenth_of_it_is_held_out() -> None:
    train, heldout = load_python_docs()
    assert len(train) + len(heldout) > 300_000
    assert len(heldout) / (len(train) + len(heldout)) == pytest.approx(0.1, abs=0.003)
    assert '"assert"' in train[:200]


def test_no_paragraph_occurs_twice_so_that_what_is_held_out_is_new() -> None:
    train, heldout = load_python_docs()
    paragraphs = [" ".join(p.split()) for p in (train + heldout).split("\n\n") if p.strip()]
    assert len(paragraphs) > 1500
    assert len(set(paragraphs)) == len(paragraphs)


def test_topics_follow_each_other_by_name_and_repetitions_go_whatever_their_layout(
    own_topics: Any,
) -> None:
    own_topics({"b": "new\n\n  two\n  words\n\nend", "a": "one\n\ntwo words\n \n\n  last\n"})
    assert "".join(load_python_docs()) == "one\n\ntwo words\n\n  last\n\nnew\n\nend\n\n"


def test_the_cut_is_after_the_last_whole_paragraph_of_the_first_nine_tenths(
    own_topics: Any,
) -> None:
    for count, kept in ((20, 18), (19, 17)):  # exactly nine tenths; 17.1 of 19
        own_topics({"a": "\n\n".join(f"word {i:03d}" for i in range(count))})
        train, heldout = load_python_docs()
        assert (len(train), len(heldout)) == (10 * kept, 10 * (count - kept))


def test_a_python_without_the_documentation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_python_docs.cache_clear()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ModuleNotFoundError, match="libpython3-stdlib"):
        load_python_docs()


def test_characters_are_numbered_by_code_point_and_others_are_token_0() -> None:
    assert VOCABULARY.characters == " dehlorw"
    assert len(VOCABULARY) == 9
    tokens = VOCABULARY.encode("hex d")
    assert tokens.tolist() == [4, 3, 0, 1, 2]
    assert tokens.dtype == torch.int64
    assert VOCABULARY.decode(tokens) == "he\N{REPLACEMENT CHARACTER} d"
    assert VOCABULARY.encode("").tolist() == []


def test_the_vocabulary_holds_the_training_text_and_no_more() -> None:
    vocabulary, (train, _) = python_docs_vocabulary(), load_python_docs()
    assert vocabulary.decode(vocabulary.encode(train)) == train
    assert set(vocabulary.characters) == set(train)


def test_an_empty_vocabulary_and_a_token_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="not empty"):
        CharVocabulary("")
    with pytest.raises(IndexError):
        VOCABULARY.decode(torch.tensor([9]))


def test_a_sample_is_a_piece_of_the_text_and_the_same_one_character_further_on() -> None:
    dataset = TextDataset("hello world", VOCABULARY, block_size=4)
    assert len(dataset) == 8
    first, last = dataset[0], dataset[7]
    assert first["tokens"].tolist() == [0, *VOCABULARY.encode("hel").tolist()]
    assert VOCABULARY.decode(first["targets"]) == "hell"
    assert VOCABULARY.decode(last["tokens"]) == "worl"
    assert VOCABULARY.decode(last["targets"]) == "orld"


@pytest.mark.parametrize("block_size", [1, 3, 4, 10, 11, 12, 50])
def test_with_the_stride_of_a_block_each_character_is_predicted_once(block_size: int) -> None:
    dataset = TextDataset("hello world", VOCABULARY, block_size, stride=block_size)
    samples = [dataset[i] for i in range(len(dataset))]
    assert all(s[k].shape == (block_size,) for s in samples for k in ("tokens", "targets"))
    targets = torch.cat([s["targets"] for s in samples])
    tokens = torch.cat([s["tokens"] for s in samples])
    assert VOCABULARY.decode(targets[targets != IGNORED_TARGET]) == "hello world"
    assert torch.equal(tokens[1:11], targets[:10])
    assert (targets[11:] == IGNORED_TARGET).all()
    assert len(targets) - 11 < block_size


def test_indices_out_of_range_end_an_iteration() -> None:
    dataset = TextDataset("hello", VOCABULARY, block_size=4)
    assert len(list(dataset)) == 2
    for index in (2, -1):
        with pytest.raises(IndexError, match=str(index)):
            dataset[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": ""}, "text must not be empty"),
        ({"block_size": 0}, "block_size must be at least 1, but got 0"),
        ({"stride": 0}, r"stride must be in \[1, 4\], but got 0"),
        ({"stride": 5}, r"stride must be in \[1, 4\], but got 5"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextDataset(**{"text": "hello", "vocabulary": VOCABULARY, "block_size": 4, **arguments})


def test_the_parts_are_the_two_texts() -> None:
    train_text, heldout_text = load_python_docs()
    train, heldout = PythonDocs("train", 64), PythonDocs("heldout", 64)
    assert len(train) == len(train_text) - 63
    assert train.vocabulary.decode(train[1000]["targets"]) == train_text[1000:1064]
    assert len(heldout) == -(-len(heldout_text) // 64)
    assert heldout.vocabulary.decode(heldout[2]["targets"]) == heldout_text[128:192]
    assert heldout.vocabulary is train.vocabulary


def test_a_misspelt_part_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="got 'held_out'; did you mean 'heldout'"):
        PythonDocs("held_out", 64)


def test_the_stream_of_batches_goes_on_where_it_was() -> None:
    dataset = TextDataset("hello world" * 3, VOCABULARY, block_size=4)
    loader = build_train_loader(dataset, total_batch_size=8, seed=3)
    stream = iter(loader)
    batches = [next(stream) for _ in range(10)]  # more than two epochs
    assert batches[0]["tokens"].shape == (8, 4)
    again = build_train_loader(dataset, total_batch_size=8, seed=3)
    again.load_state_dict({**loader.state_dict(), "batches": 7})
    for batch, other in zip(batches[7:], again, strict=False):
        assert torch.equal(batch["tokens"], other["tokens"])


def test_all_that_is_held_out_comes_in_the_batches_of_an_evaluation() -> None:
    targets = [b["targets"] for b in build_test_loader(PythonDocs("heldout", 128), batch_size=50)]
    counted = sum(int((t != IGNORED_TARGET).sum()) for t in targets)
    assert counted == len(load_python_docs()[1])
