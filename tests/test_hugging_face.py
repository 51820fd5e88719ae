"""Models of transformers train and are evaluated as they are, from a folder on the disk."""

import vision  # noqa: F401  # before transformers, which imports torchvision

# isort: split
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooktrain.engine import SimpleTrainer
from hooktrain.evaluation import MetricEvaluator, inference_on_dataset
from hooktrain.solver import AmpOptimWrapper, OptimWrapper
from hooktrain.utils.env import seed_step


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any, address: Any) -> None:
        raise AssertionError(f"connects to {address}")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(params=["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One with a tiny model of random weights; its name is that of the model's class."""
    import transformers

    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "num_attention_heads": 2}
    if "Causal" in request.param:
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(**sizes, **ends, n_embd=16, n_positions=32)
    else:
        config = transformers.BertConfig(
            **sizes, hidden_size=16, intermediate_size=16, num_labels=3
        )
    folder = tmp_path / request.param
    getattr(transformers, request.param).from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    import transformers

    return getattr(transformers, folder.name).from_pretrained(folder)


def batches(folder: Path) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(50, (4, 8, 12), generator=generator)
    labels = tokens if "Causal" in folder.name else tokens[:, :, 0] % 3
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": of}
        for ids, of in zip(tokens, labels, strict=True)
    ]


def trainer_of(folder: Path) -> SimpleTrainer:
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapper = AmpOptimWrapper(optimizer, "bfloat16", accumulative_counts=2)
    trainer = SimpleTrainer(model, batches(folder), wrapper)
    trainer.seed = 3
    return trainer


def test_training_equals_a_loop_of_ones_own_bit_for_bit(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(folder)
    with caplog.at_level(logging.INFO, "hooktrain.model"):
        trainer.train(0, 2)
    told = f"forward() of {type(trainer.model).__name__}"
    assert [told in message for message in caplog.messages].count(True) == 1
    model = load(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for iteration, pair in enumerate([batches(folder)[:2], batches(folder)[2:]]):
        seed_step(3, iteration, rank=0)
        for batch in pair:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def error_rate(outputs: Any, targets: Tensor) -> Tensor:
    return (outputs.logits.argmax(-1) != targets).float().mean()


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return outputs.loss


def test_evaluations_give_the_outputs_to_metrics(folder: Path) -> None:
    model = load(folder)
    data = batches(folder)
    metrics = [MetricEvaluator(each, "labels") for each in (error_rate, loss)]
    found = inference_on_dataset(model, data, metrics)
    with torch.no_grad():
        outputs = [model(**batch) for batch in data]
    wrong = sum(
        error_rate(output, batch["labels"])
        for output, batch in zip(outputs, data, strict=True)
    )
    losses = sum(output.loss for output in outputs)
    assert found == {
        "error_rate": pytest.approx(float(wrong) / 4),
        "loss": pytest.approx(float(losses) / 4),
    }


class TokenTrainer(SimpleTrainer):
    """As in docs/guide/hugging-face.md."""

    def weight(self, data: Any) -> Any:
        return (data["labels"][:, 1:] != -100).sum()


@pytest.mark.parametrize("folder", ["AutoModelForCausalLM"], indirect=True)
def test_texts_of_unequal_lengths_train_in_parts_as_in_one_batch(folder: Path) -> None:
    ids = torch.randint(50, (6, 12), generator=torch.Generator().manual_seed(4))
    lengths = torch.tensor([12, 3, 11, 2, 5, 1])
    labels = ids.masked_fill(torch.arange(12) >= lengths[:, None], -100)
    gradients = []
    losses = []
    for size in (6, 2):
        model = load(folder)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        parts = zip(ids.split(size), labels.split(size), strict=True)
        data = [{"input_ids": part, "labels": of} for part, of in parts]
        wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), len(data))
        trainer = TokenTrainer(model, data, wrapper)
        trainer.train(0, 1)
        gradients.append([p.grad for p in model.parameters()])
        losses.append(trainer.storage.latest()["total_loss"][0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
