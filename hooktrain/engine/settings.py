"""The settings of a configuration, and the defaults of its ``train``."""

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hooktrain.utils.names import did_you_mean

logger = logging.getLogger(__name__)

_PARTS = {
    **dict.fromkeys(("model", "optimizer", "lr_multiplier", "hooks", "writers")),
    "dataloader": dict.fromkeys(("train", "test", "evaluator")),
}


def train_settings() -> dict[str, Any]:
    """Return the settings of ``train`` in a configuration with their defaults, as a new dict."""
    return dict(
        output_dir="./output",
        # An address that checkpoints are copied to, such as "s3://bucket/run", from which another
        # machine can resume.
        store="",
        init_checkpoint="",  # weights to start from, a path or an address; "" for none
        # The parts that --resume loads: None is all, else like ["model", "trainer.optimizer"].
        resume_parts=None,
        max_iter=None,  # the number of iterations of the run, such as 90000
        max_epochs=None,  # in place of max_iter. Periods may be "1 epoch" or "10 minutes"
        seed=1,  # None draws one and writes it into config.json, from which --resume reads it
        # The name of the run in an experiment tracker. None draws one, which a resume keeps.
        run_id=None,
        # "auto" depends on the number of processes. Others are a name such as "FSDPStrategy", or a
        # call with options, such as L(FSDPStrategy)(wrap=["Block"]).
        strategy="auto",
        device=None,  # like "cpu" or "cuda:1"; None is the accelerator, if there is one
        # True, or a dict of torch.compile's arguments.
        compile=False,
        # Names of classes such as ["Block"], which are recomputed in the backward pass.
        activation_checkpointing=None,
        cudnn_benchmark=False,
        amp=dict(enabled=False, dtype="float16"),
        accumulative_counts=1,  # batches per update
        clip_grad=None,  # like dict(max_norm=1.0), or dict(type="value", clip_value=0.5)
        ddp=dict(
            wrapper=None,  # a class; None chooses by the model
            broadcast_buffers=False,
            find_unused_parameters=False,
            fp16_compression=False,
        ),
        sync_bn=False,  # whether batch norms compute statistics over the batches of all ranks
        ema=dict(enabled=False, decay=0.999),
        checkpointer=dict(
            period=5000,
            max_to_keep=3,
            background=False,  # training waits only for a copy of the state, which a thread writes
            sharded=False,  # a folder into which each rank writes its part, instead of one file
        ),
        eval_period=5000,  # 0 evaluates at the end only
        best_metric=None,  # such as "classification/accuracy": keeps model_best.pth
        best_mode=None,  # "max" or "min" of best_metric
        # Results to check at the end, as [("classification", "accuracy", 99.0, 1.0)].
        expected_results=None,
        log_period=20,
    )


def check_settings(cfg: Mapping[str, Any]) -> None:
    """Reject unknown keys.

    A configuration and its ``dataloader`` may have additional values, to which others refer, and
    ``train.ddp`` takes further options of DistributedDataParallel. There an unknown key is an error
    only if it resembles a known one. Otherwise it is logged, as a warning if it is a ``LazyCall``,
    which will not be instantiated.

    Args:
        cfg: the whole configuration.

    Raises:
        ValueError: for an unknown key; the message suggests the nearest.
        TypeError: for a value in place of a dict of settings.
    """
    _refuse_unknown("", cfg, {**_PARTS, "train": train_settings()})


def _refuse_unknown(
    where: str, given: Mapping[str, Any], known: Mapping[str, Any]
) -> None:
    for key, value in given.items():
        if key not in known:
            near = get_close_matches(key, known, 1, 0.8)
            if near or where not in ("", "dataloader.", "train.ddp."):
                raise ValueError(f"unknown key {where}{key}{did_you_mean(key, known)}")
            is_call = isinstance(value, Mapping) and "_target_" in value
            log = logger.warning if is_call else logger.info
            log("%s%s is not a setting of hooktrain", where, key)
        elif isinstance(known[key], dict):
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"{where}{key} must be a dict such as {known[key]!r}, not {value!r}"
                )
            _refuse_unknown(f"{where}{key}.", value, known[key])
