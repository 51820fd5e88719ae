"""Calls that scripts written for detectron2 make must mean the same here: names and arguments."""

import inspect
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from hooktrain.engine import DEFAULT_TIMEOUT
from hooktrain.utils.names import locate

# Where a name stands below hooktrain, and its parameters over there. What is promised: the same
# parameters come first, in this order, of the same kind and with these defaults.
SIGNATURES = {
    "engine.TrainerBase": "",
    "engine.TrainerBase.register_hooks": "self, hooks",
    "engine.TrainerBase.train": "self, start_iter, max_iter",
    "engine.TrainerBase.load_state_dict": "self, state_dict",
    "engine.SimpleTrainer": (
        "model, data_loader, optimizer, gather_metric_period=1, zero_grad_before_forward=False, "
        "async_write_metrics=False"
    ),
    "compat.detectron2.SimpleTrainer.reset_data_loader": "self, data_loader_builder",
    "engine.SimpleTrainer._write_metrics": "self, loss_dict, data_time, prefix='', iter=None",
    "engine.AMPTrainer": (
        "model, data_loader, optimizer, gather_metric_period=1, zero_grad_before_forward=False, "
        "grad_scaler=None, precision=torch.float16, log_grad_scaler=False, "
        "async_write_metrics=False"
    ),
    "compat.detectron2.DefaultTrainer": "cfg",
    "compat.detectron2.DefaultTrainer.resume_or_load": "self, resume=True",
    "compat.detectron2.DefaultTrainer.build_model": "cfg",
    "compat.detectron2.DefaultTrainer.build_optimizer": "cfg, model",
    "compat.detectron2.DefaultTrainer.build_train_loader": "cfg",
    "compat.detectron2.DefaultTrainer.test": "cfg, model",
    "engine.create_ddp_model": "model, *, fp16_compression=False, **kwargs",
    "engine.default_argument_parser": "epilog=None",
    "engine.default_setup": "cfg, args",
    "engine.default_writers": "output_dir, max_iter=None",
    "engine.defaults.default_setup": "cfg, args",
    "engine.launch": (
        "main_func, num_gpus_per_machine, num_machines=1, machine_rank=0, dist_url=None, args=(), "
        "timeout=DEFAULT_TIMEOUT"
    ),
    "compat.detectron2.AutogradProfiler": "enable_predicate, output_dir, *, use_cuda=True",
    "compat.detectron2.BestCheckpointer": (
        "eval_period, checkpointer, val_metric, mode='max', file_prefix='model_best'"
    ),
    "engine.hooks.CallbackHook": (
        "*, before_train=None, after_train=None, before_step=None, after_step=None"
    ),
    "engine.hooks.EvalHook": "eval_period, eval_function, eval_after_train=True",
    "engine.hooks.IterationTimer": "warmup_iter=3",
    "engine.hooks.LRScheduler": "optimizer=None, scheduler=None",
    "engine.hooks.LRScheduler.get_best_param_group_id": "optimizer",
    "engine.hooks.PeriodicWriter": "writers, period=20",
    "engine.hooks.PreciseBN": "period, model, data_loader, num_iter",
    "engine.hooks.TorchProfiler": (
        "enable_predicate, output_dir, *, activities=None, save_tensorboard=True"
    ),
    "events.CommonMetricPrinter": "max_iter=None, window_size=20",
    "events.EventStorage": "start_iter=0",
    "events.EventStorage.count_samples": "self, name, window_size=20",
    "events.EventStorage.history": "self, name",
    "events.EventStorage.latest_with_smoothing_hint": "self, window_size=20",
    "events.EventStorage.name_scope": "self, name",
    "events.EventStorage.put_histogram": "self, hist_name, hist_tensor, bins=1000",
    "events.EventStorage.put_image": "self, img_name, img_tensor",
    "events.EventStorage.put_scalar": "self, name, value, smoothing_hint=True, cur_iter=None",
    "events.EventStorage.put_scalars": (
        "self, *, smoothing_hint=True, cur_iter=None, **kwargs"
    ),
    "events.HistoryBuffer": "max_length=1000000",
    "events.HistoryBuffer.avg": "self, window_size",
    "events.HistoryBuffer.median": "self, window_size",
    "events.HistoryBuffer.update": "self, value, iteration=None",
    "events.JSONWriter": "json_file, window_size=20",
    "events.TensorboardXWriter": "log_dir, window_size=20, **kwargs",
    "utils.comm.all_gather": "data, group=None",
    "compat.detectron2.gather": "data, dst=0, group=None",
    "compat.detectron2.reduce_dict": "input_dict, average=True",
    "compat.detectron2.seed_all_rng": "seed=None",
    "compat.detectron2.create_small_table": "small_dict",
    "compat.detectron2.log_every_n_seconds": "lvl, msg, n=1, *, name=None",
    "compat.detectron2.log_first_n": "lvl, msg, n=1, *, name=None, key='caller'",
    "compat.detectron2.setup_logger": (
        "output=None, distributed_rank=0, *, color=True, name='hooktrain', abbrev_name=None, "
        "enable_propagation=False, configure_stdout=True"
    ),
    "compat.registry.Registry": "name",
    "compat.registry.Registry.get": "self, name",
    "compat.registry.Registry.register": "self, obj",
    "utils.names.locate": "name",
    "checkpoint.Checkpointer": "model, save_dir='', *, save_to_disk=True, **checkpointables",
    "checkpoint.Checkpointer.add_checkpointable": "self, key, checkpointable",
    "checkpoint.Checkpointer.load": "self, path, checkpointables=None",
    "checkpoint.Checkpointer.resume_or_load": "self, path, *, resume=True",
    "checkpoint.Checkpointer.save": "self, name, **kwargs",
    "compat.detectron2.PeriodicCheckpointer": (
        "checkpointer, period, max_iter=None, max_to_keep=None, file_prefix='model'"
    ),
    "compat.detectron2.PeriodicCheckpointer.save": "self, name, **kwargs",
    "compat.detectron2.PeriodicCheckpointer.step": "self, iteration, **kwargs",
    "solver.CompositeParamScheduler": "schedulers, lengths, interval_scaling",
    "solver.ConstantParamScheduler": "value",
    "solver.CosineParamScheduler": "start_value, end_value",
    "solver.ExponentialParamScheduler": "start_value, decay",
    "solver.LRMultiplier": "optimizer, multiplier, max_iter, last_iter=-1",
    "solver.LinearParamScheduler": "start_value, end_value",
    "solver.MultiStepParamScheduler": "values, num_updates=None, milestones=None",
    "solver.ParamScheduler.__call__": "self, where",
    "solver.PolynomialDecayParamScheduler": "base_value, power",
    "compat.detectron2.solver.StepParamScheduler": "num_updates, values",
    "compat.detectron2.solver.StepWithFixedGammaParamScheduler": (
        "base_value, num_decays, gamma, num_updates"
    ),
    "solver.WarmupParamScheduler": (
        "scheduler, warmup_factor, warmup_length, warmup_method='linear', rescale_interval=False"
    ),
    "solver.get_default_optimizer_params": (
        "model, base_lr=None, weight_decay=None, weight_decay_norm=None, bias_lr_factor=1.0, "
        "weight_decay_bias=None, lr_factor_func=None, overrides=None"
    ),
    "solver.build.get_default_optimizer_params": "model, base_lr=None",
    "compat.detectron2.DatasetFromList": "lst, copy=True, serialize=True",
    "data.MapDataset": "dataset, map_func",
    "compat.detectron2.ToIterableDataset": (
        "dataset, sampler, shard_sampler=True, shard_chunk_size=1"
    ),
    "data.samplers.InferenceSampler": "size",
    "data.samplers.TrainingSampler": "size, shuffle=True, seed=None",
    "evaluation.DatasetEvaluator.process": "self, inputs, outputs",
    "evaluation.DatasetEvaluators": "evaluators",
    "evaluation.flatten_results_dict": "results",
    "evaluation.inference_context": "model",
    "evaluation.inference_on_dataset": "model, data_loader, evaluator",
    "evaluation.print_csv_format": "results",
    "config.LazyCall": "target",
    "config.LazyConfig.apply_overrides": "cfg, overrides",
    "config.LazyConfig.load": "filename, keys=None",
    "compat.detectron2.LazyConfig.load_rel": "filename, keys=None",
    "config.LazyConfig.save": "cfg, filename",
    "config.LazyConfig.to_py": "cfg, prefix='cfg.'",
    "config.instantiate": "cfg",
    "model.get_bn_modules": "model",
    "model.update_bn_stats": "model, data_loader, num_iters=200",
}

# Methods and functions without arguments.
METHODS = """
engine.HookBase: after_backward after_step after_train before_step before_train state_dict
engine.TrainerBase: before_train after_train before_step after_backward after_step run_step
engine.TrainerBase: state_dict
engine.SimpleTrainer: run_step
compat.detectron2.DefaultTrainer: train build_hooks build_writers
engine.hooks.PreciseBN: update_stats
events.EventStorage: clear_histograms clear_images histories latest smoothing_hints step
events.EventWriter: close write
events.HistoryBuffer: global_avg latest values
checkpoint.Checkpointer: get_checkpoint_file has_checkpoint
compat.detectron2.Checkpointer: get_all_checkpoint_files
evaluation.DatasetEvaluator: evaluate reset
"""
FUNCTIONS = """
events: get_event_storage has_event_storage
utils.comm: get_local_rank get_local_size get_rank get_world_size
utils.comm: is_main_process shared_random_seed synchronize
utils.collect_env: collect_env_info
"""
for _table, _arguments in ((METHODS, "self"), (FUNCTIONS, "")):
    for _line in _table.strip().splitlines():
        _owner, _names = _line.split(":")
        for _name in _names.split():
            SIGNATURES[f"{_owner}.{_name}"] = _arguments

# Where a default differs, on purpose: the value here, and why.
OTHER_DEFAULTS = {
    # All values of the period are kept all the same, so less often loses nothing.
    ("engine.SimpleTrainer", "gather_metric_period"): 20,
    ("engine.AMPTrainer", "gather_metric_period"): 20,
    # Ten thousand values of each metric are more than any writer or user reads back.
    ("events.HistoryBuffer", "max_length"): 10_000,
    # None stands for "on the main process", which is right on one process and on many.
    ("checkpoint.Checkpointer", "save_to_disk"): None,
    # None stands for the rank of this process.
    ("compat.detectron2.setup_logger", "distributed_rank"): None,
}


def find(name: str) -> Any:
    return locate(f"hooktrain.{name}")


def parameters_there(text: str) -> dict[str, inspect.Parameter]:
    names = {"torch": torch, "DEFAULT_TIMEOUT": DEFAULT_TIMEOUT}
    return dict(inspect.signature(eval(f"lambda {text}: None", names)).parameters)


def of_kind(parameters: Mapping[str, inspect.Parameter], kind: Any) -> list[str]:
    return [name for name, parameter in parameters.items() if parameter.kind is kind]


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_call_written_for_detectron2_is_understood(name: str) -> None:
    found = find(name)
    if isinstance(found, type):
        # Before Python 3.11 the signature of a class is that of __new__.
        found = partial(found.__init__, None)
    here = inspect.signature(found).parameters
    there = parameters_there(SIGNATURES[name])
    positional = of_kind(there, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ours = of_kind(here, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert ours[: len(positional)] == positional
    assert set(of_kind(there, inspect.Parameter.KEYWORD_ONLY)) <= set(here)
    if of_kind(there, inspect.Parameter.VAR_KEYWORD):
        assert of_kind(here, inspect.Parameter.VAR_KEYWORD)
    for parameter in there.values():
        if parameter.default is not parameter.empty:
            key = (name, parameter.name)
            expected = OTHER_DEFAULTS.get(key, parameter.default)
            assert here[parameter.name].default == expected
    for parameter in here.values():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            is_optional = parameter.default is not parameter.empty
            assert is_optional or parameter.name in there


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("engine", "hooks HookBase TrainerBase SimpleTrainer AMPTrainer"),
        ("engine.train_loop", "HookBase TrainerBase"),
        ("engine.launch", "DEFAULT_TIMEOUT launch"),
        ("engine.defaults", "create_ddp_model default_argument_parser default_setup"),
        ("engine.defaults", "default_writers"),
        ("compat.detectron2", "DefaultTrainer"),
        ("events", "EventStorage EventWriter JSONWriter get_event_storage"),
        ("solver.build", "get_default_optimizer_params reduce_param_groups"),
    ],
)
def test_the_modules_that_scripts_import_from_are_there(
    module: str, names: str
) -> None:
    # An attribute of the package may hide the module, as the function launch does.
    found = import_module(f"hooktrain.{module}")
    assert [name for name in names.split() if not hasattr(found, name)] == []
