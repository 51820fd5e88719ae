"""A loss that blows up takes the run back, and the batches that led there are left out."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equality import assert_equal
from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.config import LazyConfig
from hooktrain.data import TrainingSampler, build_train_loader
from hooktrain.engine import DefaultTrainer, SimpleTrainer, hooks
from hooktrain.strategy import wrap_in_ddp
from hooktrain.utils import comm
from toys import LinearLoss

CONFIG = Path(__file__).parent.parent.parent.parent / "configs" / "digits_cnn.py"


def data(bad: dict[int, float]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 4, generator=generator) * bad.get(i, 1.0) for i in range(40)]


class Noisy(LinearLoss):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.1))


def make(batches: Any, *more: hooks.HookBase, period: int = 20) -> SimpleTrainer:
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = SimpleTrainer(model, batches, optimizer, gather_metric_period=period)
    trainer.seed = 3
    trainer.register_hooks(more)
    return trainer


def rewinding(
    folder: Path, bad: dict[int, float], rewind: hooks.Rewind, save_period: int = 5
) -> tuple[SimpleTrainer, Checkpointer]:
    """A trainer whose loader keeps its position, in the order of the list."""
    loader = build_train_loader(
        data(bad),  # type: ignore[arg-type]
        total_batch_size=1,
        seed=0,
        sampler=TrainingSampler(40, shuffle=False, seed=0),
        collate_fn=lambda samples: samples[0],
    )
    trainer = make(loader, rewind, period=4)
    checkpointer = Checkpointer(trainer.model, folder, trainer=trainer)
    trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, save_period)])
    return trainer, checkpointer


def train(
    trainer: SimpleTrainer,
    checkpointer: Checkpointer,
    rewind: hooks.Rewind,
    max_iter: int = 20,
) -> None:
    """The loop of the class's docstring."""
    while True:
        try:
            trainer.train(max_iter=max_iter)
            return
        except FloatingPointError as error:
            rewind.go_back(error, checkpointer)


@pytest.mark.parametrize(
    ("value", "noticed", "back"),
    [
        (math.nan, 12, 9),  # at once, so the checkpoint of iteration 9 is the newest
        (100.0, 15, 9),  # at the end of the period, when 14 was saved after the spike
    ],
)
def test_the_run_ends_like_one_without_the_batches_that_were_left_out(
    tmp_path: Path, value: float, noticed: int, back: int
) -> None:
    rewind = hooks.Rewind(factor=20.0, window=6)
    trainer, checkpointer = rewinding(tmp_path, {12: value}, rewind)
    train(trainer, checkpointer, rewind)
    good = data({})
    reference = make(good[: back + 1] + good[noticed + 1 :])
    reference.train(max_iter=20)
    assert_equal(trainer.model.state_dict(), reference.model.state_dict())
    losses = [t.storage.history("total_loss").values() for t in (trainer, reference)]
    assert losses[0] == losses[1]
    ((first, last, reason),) = rewind.rewinds
    assert (first, last) == (back + 1, noticed)
    assert "iteration=12" in reason or "at iteration 12" in reason

    # A run that ends after it has gone back, and is resumed, does the same.
    (tmp_path / "last_checkpoint").write_text("model_0000014.pth")
    again = hooks.Rewind(factor=20.0, window=6)
    resumed, checkpointer = rewinding(tmp_path, {12: value}, again)
    checkpointer.resume_or_load("")
    assert again.rewinds == rewind.rewinds
    train(resumed, checkpointer, again)
    assert_equal(resumed.model.state_dict(), reference.model.state_dict())


def test_a_run_that_dies_right_after_it_has_gone_back_resumes_from_there(
    tmp_path: Path,
) -> None:
    rewind = hooks.Rewind(factor=20.0, window=6)
    trainer, checkpointer = rewinding(tmp_path, {12: 100.0}, rewind)
    with pytest.raises(
        FloatingPointError, match=r"at iteration 12, more than 20 times the"
    ) as bad:
        trainer.train(max_iter=20)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000014.pth"
    rewind.go_back(bad.value, checkpointer)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000009.pth"


def test_the_error_ends_the_run_without_a_checkpoint_or_when_it_comes_too_often(
    tmp_path: Path,
) -> None:
    rewind = hooks.Rewind()
    with pytest.raises(FloatingPointError, match="iteration=3"):
        train(*rewinding(tmp_path / "early", {3: math.nan}, rewind), rewind)
    assert rewind.rewinds == []
    rewind = hooks.Rewind(max_rewinds=2)
    bad = {12: math.nan, 15: math.nan, 18: math.nan}
    with pytest.raises(FloatingPointError, match="iteration=12"):
        train(*rewinding(tmp_path / "often", bad, rewind), rewind)
    assert [rewound[:2] for rewound in rewind.rewinds] == [(10, 12), (10, 12)]


def test_the_default_trainer_goes_back_by_itself(tmp_path: Path) -> None:
    class Poisoned(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg: Any) -> Any:
            samples = [{"image": torch.ones(1, 8, 8), "label": 1}] * 8
            poison = [{"image": torch.full((1, 8, 8), math.nan), "label": 1}]
            return build_train_loader(
                samples[:7] + poison + samples,  # type: ignore[arg-type]
                total_batch_size=1,
                sampler=TrainingSampler(16, shuffle=False),
            )

        def build_hooks(self) -> list[Any]:
            found = super().build_hooks()
            return [
                hooks.Rewind(),
                *(h for h in found if not isinstance(h, hooks.EvalHook)),
            ]

    cfg = LazyConfig.load(str(CONFIG))
    options = [
        "train.max_iter=10",
        "train.checkpointer.period=3",
        "train.best_metric=null",
    ]
    options += [f"train.output_dir={tmp_path}", "model.channels=2"]
    trainer = Poisoned(LazyConfig.apply_overrides(cfg, options))
    trainer.train()
    assert trainer.iter == 10
    lines = (tmp_path / "metrics.json").read_text()
    assert "NaN" not in lines


def ranks_go_back(folder: Path) -> Any:
    torch.manual_seed(0)
    model = wrap_in_ddp(LinearLoss(), torch.device("cpu"))
    # The last batch of rank 1 is bad, and noticed by both at the end of the period.
    samples = [torch.ones(2, 4) for _ in range(40)]
    samples[9] = samples[9] * (math.nan if comm.get_rank() == 1 else 1)
    trainer = SimpleTrainer(
        model, samples, torch.optim.SGD(model.parameters()), gather_metric_period=4
    )
    rewind = hooks.Rewind()
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    periodic = hooks.PeriodicCheckpointer(checkpointer, period=6)
    trainer.register_hooks([rewind, periodic])
    train(trainer, checkpointer, rewind, 14)
    weights = [parameter.tolist() for parameter in model.parameters()]
    return rewind.rewinds[0][:2], weights


def test_all_ranks_go_back_together(tmp_path: Path) -> None:
    first, second = run_ranks(ranks_go_back, 2, tmp_path)
    assert first == second
    assert first[0] == (6, 11)
    assert all(math.isfinite(value) for value in first[1][-1])
