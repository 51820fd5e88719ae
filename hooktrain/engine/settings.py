"""What a configuration, and its ``train``, can hold."""

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
    """What ``train`` of a configuration can hold, with its defaults, in a new dict."""
    return dict(
        output_dir="./output",
        # Where checkpoints go too, such as "s3://bucket/run": another machine goes on from there.
        store="",
        init_checkpoint="",  # weights to start from, a path or an address; "" for none
        # What --resume loads: None is all, else a list such as ["model", "trainer.optimizer"].
        resume_parts=None,
        max_iter=None,  # where the run ends, such as 90000
        max_epochs=None,  # in place of max_iter. Periods may be "1 epoch" or "10 minutes"
        epoch_length=None,  # iterations of an epoch; None asks the loader
        seed=1,  # None draws one and writes it into config.json, where --resume takes it from
        # By this an experiment tracker goes on in the same run. None draws one, and keeps it.
        run_id=None,
        # "auto" takes the processes that there are. Others are a name such as "FSDPStrategy", or a
        # call with options, such as L(FSDPStrategy)(wrap=["Block"]).
        strategy="auto",
        device=None,  # None is the accelerator, if there is one; else like "cpu" or "cuda:1"
        # True, names of classes such as ["Block"], or a dict of torch.compile's arguments.
        compile=False,
        # Names of classes such as ["Block"], which are computed again in the backward pass.
        activation_checkpointing=None,
        cudnn_benchmark=False,
        amp=dict(enabled=False, dtype="float16"),
        accumulative_counts=1,  # batches to one update
        clip_grad=None,  # like dict(max_norm=1.0), or dict(type="value", clip_value=0.5)
        ddp=dict(
            wrapper=None,  # a class or its dotted name; None is the one that fits the model
            broadcast_buffers=False,
            find_unused_parameters=False,
            fp16_compression=False,
        ),
        sync_bn=None,  # "torch": batch norms take their statistics from the batches of all ranks
        # enable=True multiplies learning rates by the batch of all ranks over base_batch_size
        auto_scale_lr=dict(enable=False, base_batch_size=None),
        ema=dict(enabled=False, decay=0.999),
        checkpointer=dict(
            period=5000,
            max_to_keep=3,
            background=False,  # training waits for a copy of the state only, and a thread writes it
            sharded=False,  # a folder that each rank writes its part of, instead of one file
        ),
        eval_period=5000,  # 0 evaluates at the end only
        best_metric=None,  # such as "classification/accuracy": keeps model_best.pth
        best_mode=None,  # whether its "max" or its "min" is best
        # Results that are checked at the end, as [("classification", "accuracy", 99.0, 1.0)].
        expected_results=None,
        log_period=20,
        watchdog_s=0,  # ends a process that makes no progress for so long; 0 waits for ever
    )


def check_settings(cfg: Mapping[str, Any]) -> None:
    """Refuse keys that nothing reads.

    A configuration and its ``dataloader`` may have values of their own, to which others refer, and
    ``train.ddp`` has further options of DistributedDataParallel. There only those keys are refused
    whose names are nearly those of known ones, and the log names the others; a ``LazyCall`` that
    nothing makes is a warning.

    Args:
        cfg: the whole configuration.

    Raises:
        ValueError: for an unknown key; the message suggests the nearest.
        TypeError: for another value in the place of a dict of settings.
    """
    _refuse_unknown("", cfg, {**_PARTS, "train": train_settings()})


def _refuse_unknown(
    where: str, given: Mapping[str, Any], known: Mapping[str, Any]
) -> None:
    for key, value in given.items():
        if key not in known:
            near = get_close_matches(key, known, 1, 0.8)
            if near or where not in ("", "dataloader.", "train.ddp."):
                raise ValueError(
                    f"nothing reads {where}{key}{did_you_mean(key, known)}"
                )
            is_call = isinstance(value, Mapping) and "_target_" in value
            level = logging.WARNING if is_call else logging.INFO
            logger.log(level, "%s%s is no setting of this package", where, key)
        elif isinstance(known[key], dict):
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"{where}{key} must be a dict such as {known[key]!r}, not {value!r}"
                )
            _refuse_unknown(f"{where}{key}.", value, known[key])
