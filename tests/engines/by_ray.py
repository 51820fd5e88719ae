"""Runs train.py on two workers of Ray, which starts them again once if one fails."""

import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from train import main

from hooktrain import launch

arguments = tuple(sys.argv[1:])  # those of a worker are others
ray.init(num_cpus=2, include_dashboard=False)
trainer = TorchTrainer(
    lambda: launch(main, args=arguments),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        storage_path=str(Path(arguments[0], "ray")),
        failure_config=FailureConfig(max_failures=1),
    ),
)
trainer.fit()
