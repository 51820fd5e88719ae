import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gloo import run_ranks
from hooktrain.demos import (
    BitsPerCharacterEvaluator,
    CharVocabulary,
    TextDataset,
    TextGPT,
    python_docs_vocabulary,
)
from hooktrain.demos.text import IGNORED_TARGET, Block, load_python_docs


def make(dropout: float = 0.0, size: Any = "tiny", block_size: int = 12) -> TextGPT:
    return TextGPT(11, block_size, size, dropout)


def batch(count: int = 3, length: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(11, (count, length + 1), generator=generator)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def reference_attention(block: Block, x: Tensor) -> Tensor:
    """The attention of a block by the formulas, one head and one place at a time."""
    batch, length, width = x.shape
    size = width // block.heads
    query, key, value = (x @ block.attention_in.weight.T).split(width, dim=-1)

    def turned(vector: Tensor, place: int) -> Tensor:
        pairs = torch.complex(vector[: size // 2], vector[size // 2 :])
        speeds = 10000.0 ** (-2 * torch.arange(size // 2) / size)
        pairs = pairs * torch.polar(torch.ones(size // 2), place * speeds)
        return torch.cat([pairs.real, pairs.imag])

    out = torch.zeros_like(x)
    for n in range(batch):
        for h in range(block.heads):
            part = slice(h * size, (h + 1) * size)
            keys = torch.stack([turned(key[n, s, part], s) for s in range(length)])
            for t in range(length):
                scores = keys[: t + 1] @ turned(query[n, t, part], t) / math.sqrt(size)
                out[n, t, part] = scores.softmax(0) @ value[n, : t + 1, part]
    return out @ block.attention_out.weight.T


def test_the_logits_are_those_of_the_formulas() -> None:
    model, data = make().eval(), batch()
    for parameter in model.parameters():
        parameter.data.mul_(torch.rand_like(parameter) * 10)
    x = model.embedding.weight[data["tokens"]]
    for block in model.blocks:
        x = x + reference_attention(
            block, F.layer_norm(x, (32,), block.attention_norm.weight)
        )
        hidden = F.layer_norm(x, (32,), block.mlp_norm.weight) @ block.mlp_in.weight.T
        x = x + F.gelu(hidden, approximate="tanh") @ block.mlp_out.weight.T
    expected = F.layer_norm(x, (32,), model.norm.weight) @ model.head.weight.T
    torch.testing.assert_close(model(data), expected, rtol=1e-4, atol=1e-4)


def test_training_gives_the_mean_cross_entropy_of_the_next_tokens() -> None:
    model, data = make(), batch()
    data["targets"] = torch.cat([data["targets"][:2], torch.full((1, 12), -1)])
    loss = model(data)
    assert list(loss) == ["loss_lm"]
    expected = F.cross_entropy(
        model.eval()(data)[:2].flatten(0, 1), data["targets"][:2].flatten()
    )
    torch.testing.assert_close(loss["loss_lm"], expected)
    model = make(dropout=0.5)
    assert not torch.equal(model(data)["loss_lm"], model(data)["loss_lm"])


def test_weights_start_like_those_of_gpt_2() -> None:
    expected = make(size=(8, 128, 4))
    with torch.device("meta"):
        model = make(size=(8, 128, 4))
    model.to_empty(device="cpu")
    for each in (expected, model):
        torch.manual_seed(4)
        each.init_weights()
    assert torch.equal(model(batch())["loss_lm"], expected(batch())["loss_lm"])
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones(128))
        else:
            deep = "_out." in name
            assert weight.std().item() == pytest.approx(
                0.02 / 4 if deep else 0.02, rel=0.1
            ), name


def test_it_learns_a_text_by_heart() -> None:
    text = torch.tensor([1, 2, 3, 1, 4, 5, 1, 6, 7, 8, 9, 10, 1])
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model({"tokens": text[None, :-1], "targets": text[None, 1:]})[
            "loss_lm"
        ].backward()
        optimizer.step()
    assert torch.equal(model.eval().generate(text[:1], 12, temperature=0), text)
    whole = model.generate(text, 5, temperature=0)
    assert torch.equal(whole[-5:], model.generate(text[-12:], 5, temperature=0)[-5:])
    assert torch.equal(model.generate(text, 0), text)


def test_generated_texts_follow_from_the_generator_alone() -> None:
    model, prompt = make(dropout=0.5).eval(), torch.tensor([3, 4])
    graphs = set()
    model.register_forward_hook(lambda *_: graphs.add(torch.is_grad_enabled()))
    state = torch.get_rng_state()
    texts = [
        model.generate(prompt, 30, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert texts[0].shape == (32,)
    assert texts[0][:2].tolist() == [3, 4]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert graphs == {False}


VOCABULARY = CharVocabulary("hello world")


def test_a_tenth_of_the_documentation_is_held_out() -> None:
    train, heldout = load_python_docs()
    assert len(train) + len(heldout) > 300_000
    assert len(heldout) / (len(train) + len(heldout)) == pytest.approx(0.1, abs=0.003)
    paragraphs = [
        " ".join(p.split()) for p in (train + heldout).split("\n\n") if p.strip()
    ]
    assert len(set(paragraphs)) == len(paragraphs) > 1500


def test_the_vocabulary_holds_the_training_text() -> None:
    vocabulary, (train, _) = python_docs_vocabulary(), load_python_docs()
    assert vocabulary.decode(vocabulary.encode(train)) == train
    assert set(vocabulary.characters) == set(train)


def test_targets_are_one_character_further_on() -> None:
    first, *_, last = samples = list(
        TextDataset("hello world", VOCABULARY, block_size=4)
    )
    assert len(samples) == 8
    assert first["tokens"].tolist() == [0, *VOCABULARY.encode("hel").tolist()]
    assert VOCABULARY.decode(first["targets"]) == "hell"
    assert VOCABULARY.decode(last["tokens"]) == "worl"
    assert VOCABULARY.decode(last["targets"]) == "orld"


@pytest.mark.parametrize("block_size", [1, 3, 4, 10, 11, 12, 50])
def test_with_the_stride_of_a_block_each_character_is_predicted_once(
    block_size: int,
) -> None:
    dataset = TextDataset("hello world", VOCABULARY, block_size, stride=block_size)
    samples = [dataset[i] for i in range(len(dataset))]
    targets = torch.cat([s["targets"] for s in samples])
    tokens = torch.cat([s["tokens"] for s in samples])
    assert VOCABULARY.decode(targets[targets != IGNORED_TARGET]) == "hello world"
    assert torch.equal(tokens[1:11], targets[:10])
    assert (targets[11:] == IGNORED_TARGET).all()
    assert len(targets) - 11 < block_size


def samples(count: int, length: int = 5, classes: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(classes, (count, length), generator=generator)
    return targets, 3 * torch.randn(count, length, classes, generator=generator)


def evaluate(*batches: tuple[Tensor, Tensor]) -> dict[str, float]:
    evaluator = BitsPerCharacterEvaluator()
    for targets, logits in batches:
        evaluator.process({"targets": targets}, logits)
    return evaluator.evaluate()["text"]


def test_each_character_counts_alike_however_the_text_is_cut_into_batches() -> None:
    targets, logits = samples(10)
    logits = logits.bfloat16()  # whose sums would be coarse
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).item()
    whole = evaluate((targets, logits))
    pieces = evaluate(
        *zip(targets.split([1, 7, 2]), logits.split([1, 7, 2]), strict=True)
    )
    assert whole["val_loss"] == pytest.approx(expected, rel=1e-14)
    assert pieces["val_loss"] == pytest.approx(expected, rel=1e-14)
    assert pieces["bits_per_character"] == pytest.approx(
        expected / math.log(2), rel=1e-14
    )


def evaluate_share(share: list[Any]) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    return evaluate(share[rank]) if share[rank] is not None else evaluate()


def test_ranks_with_unequal_shares_agree_to_the_last_bit_on_the_whole() -> None:
    targets, logits = samples(7)
    shares = [(targets[:6], logits[:6]), (targets[6:], logits[6:]), None]
    results = run_ranks(evaluate_share, 3, shares)
    assert results[0] == results[1] == results[2]
    assert results[0] == pytest.approx(evaluate((targets, logits)), rel=1e-14)
