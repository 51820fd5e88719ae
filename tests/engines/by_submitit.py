"""Runs train.py in two tasks of submitit's local executor, which requeues it after SIGUSR2."""

import sys
from pathlib import Path

import submitit
from train import main

from hooktrain import launch


class Run(submitit.helpers.Checkpointable):
    def __call__(self, *arguments: str) -> None:
        launch(main, args=arguments)


if __name__ == "__main__":
    executor = submitit.AutoExecutor(Path(sys.argv[1], "jobs"), cluster="local")
    executor.update_parameters(tasks_per_node=2, timeout_min=10)
    executor.submit(Run(), *sys.argv[1:]).results()
