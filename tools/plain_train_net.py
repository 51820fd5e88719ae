"""The same job as train_net.py, but without a trainer and hooks: write your own loop if you like.

    python tools/plain_train_net.py --config-file configs/digits_cnn.py

It uses hooktrain's configuration, checkpoints, metrics and evaluation. It lacks the trainer's mixed
precision, accumulation, random numbers that a resume does not change, and hooks.
"""

import argparse
import logging
import math

from hooktrain.checkpoint import Checkpointer
from hooktrain.compat.detectron2 import PeriodicCheckpointer  # for loops without hooks
from hooktrain.config import LazyConfig, instantiate
from hooktrain.engine import (
    create_ddp_model,
    default_argument_parser,
    default_setup,
    default_writers,
    launch,
)
from hooktrain.evaluation import inference_on_dataset, print_csv_format
from hooktrain.events import EventStorage
from hooktrain.solver import LRMultiplier
from hooktrain.strategy.environment import choose_device
from hooktrain.utils import comm
from hooktrain.utils.tensors import mover_to

logger = logging.getLogger("hooktrain.plain_train_net")


def main(args: argparse.Namespace) -> None:
    """Run one process."""
    cfg = LazyConfig.load(args.config_file)
    cfg = LazyConfig.apply_overrides(cfg, args.opts)
    default_setup(cfg, args)

    model = instantiate(cfg.model).to(choose_device(cfg.train.device))
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    data_loader = instantiate(cfg.dataloader.train)
    max_iter = cfg.train.max_iter

    checkpointer = Checkpointer(
        model, cfg.train.output_dir, optimizer=optimizer, data=data_loader
    )
    loaded = checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
    start_iter = loaded.get("iteration", -1) + 1 if args.resume else 0
    scheduler = LRMultiplier(
        optimizer, instantiate(cfg.lr_multiplier), max_iter, last_iter=start_iter - 1
    )
    periodic = PeriodicCheckpointer(
        checkpointer,
        cfg.train.checkpointer.period,
        max_iter,
        cfg.train.checkpointer.max_to_keep,
    )
    writers = default_writers(cfg.train.output_dir, max_iter)
    ddp_model = create_ddp_model(model, **cfg.train.ddp)
    ddp_model.train()
    move = mover_to(model)

    with EventStorage(start_iter) as storage:
        for writer in writers:
            writer.rewind(start_iter)
        batches = zip(range(start_iter, max_iter), data_loader, strict=False)
        for iteration, batch in batches:
            storage.iter = iteration
            loss_dict = ddp_model(move(batch))
            loss = sum(loss_dict.values())
            if not math.isfinite(loss.item()):
                raise FloatingPointError(
                    f"loss is {loss.item()} at iteration {iteration}"
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            storage.put_scalars(total_loss=loss.detach())
            storage.put_scalar(
                "lr", optimizer.param_groups[0]["lr"], smoothing_hint=False
            )
            scheduler.step()
            if (iteration + 1) % cfg.train.log_period == 0 or iteration == max_iter - 1:
                for writer in writers:
                    writer.write()
            periodic.step(iteration)
        for writer in writers:
            writer.close()

    results = inference_on_dataset(
        model, instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator)
    )
    if comm.is_main_process():
        print_csv_format(results)


if __name__ == "__main__":
    args = default_argument_parser().parse_intermixed_args()
    launch(
        main,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )
