"""Rules that give parameters learning rates and weight decays of their own, as in MMEngine."""

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from torch import nn

from hooktrain.solver.build import _NORMS, ParamGroup, _named_parameters, reduce_param_groups
from hooktrain.utils.registry import did_you_mean

__all__ = ["ParamwiseRules"]

logger = logging.getLogger(__name__)

# Deformable convolutions, which are not torch's: known by the name of a class or a base class.
_DCN = {"DeformConv2d", "ModulatedDeformConv2d"}


@dataclass(frozen=True)
class ParamwiseRules:
    """What a ``paramwise_cfg`` says; each multiplier is at least 0, and None leaves things alone.

    A parameter that a custom key matches has the settings of that key and of no other rule.
    For the others the multipliers apply; of several multipliers of the weight decay that would
    apply, the order is norm, bias, dwconv, flat.

    Attributes:
        custom_keys: settings by a part of a parameter's name: ``{"backbone": {"lr_mult": 0.1}}``.
            Of several keys the longest counts, of equally long ones the alphabetically first. A
            setting is ``lr_mult``, ``decay_mult``, or an option of the parameter group. The name
            of a parameter of the model itself begins with a dot here, so that ``".bias"`` matches
            every bias.
        bias_lr_mult: for the learning rate of parameters named ``bias``, but for those of
            normalisation layers and in deformable convolutions.
        bias_decay_mult: for the weight decay of parameters named ``bias``, but for those in
            deformable convolutions.
        norm_decay_mult: for the weight decay of normalisation layers.
        dwconv_decay_mult: for the weight decay of depthwise convolutions (2d).
        flat_decay_mult: for the weight decay of one-dimensional parameters, but for those in
            deformable convolutions.
        dcn_offset_lr_mult: for the learning rate of a ``conv_offset`` in a deformable convolution.
        bypass_duplicate: where a parameter has several names, apply the rules to the first of
            them, with a warning; otherwise it is an error if they lead to different settings.

    Raises:
        TypeError: if ``custom_keys`` is no dict of dicts, or a multiplier is not a number.
        ValueError: if a multiplier is negative or not finite.
    """

    custom_keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bias_lr_mult: float | None = None
    bias_decay_mult: float | None = None
    norm_decay_mult: float | None = None
    dwconv_decay_mult: float | None = None
    flat_decay_mult: float | None = None
    dcn_offset_lr_mult: float | None = None
    bypass_duplicate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.custom_keys, Mapping):
            raise TypeError(f"custom_keys must be a dict of dicts, but got {self.custom_keys!r}")
        for key, settings in self.custom_keys.items():
            if not isinstance(key, str) or not isinstance(settings, Mapping):
                raise TypeError(
                    f"custom_keys must map a part of a name to a dict, but got {key!r}: "
                    f"{settings!r}"
                )
        for rule, value in self._multipliers().items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise TypeError(f"{rule} must be a number, but got {value!r}")
            if not 0 <= value < math.inf:
                raise ValueError(f"{rule} must be finite and not negative, but got {value!r}")
        if not isinstance(self.bypass_duplicate, bool):
            raise TypeError(f"bypass_duplicate must be a bool, but got {self.bypass_duplicate!r}")

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any]) -> "ParamwiseRules":
        """The rules of a dict.

        Raises:
            TypeError: if it is no dict, or as the constructor does.
            ValueError: for an unknown rule, or as the constructor does.
        """
        if not isinstance(cfg, Mapping):
            raise TypeError(f"paramwise_cfg must be None or a dict, but got {cfg!r}")
        rules = [rule.name for rule in fields(cls)]
        if unknown := [key for key in cfg if key not in rules]:
            hint = did_you_mean(unknown[0], rules)
            raise ValueError(f"paramwise_cfg has no rule {unknown[0]!r}{hint}")
        return cls(**cfg)

    def check(self, base_lr: Any, base_wd: Any, options: Collection[str]) -> None:
        """See that there is something to multiply, and that no setting is a misspelt one.

        Args:
            base_lr: the optimizer's learning rate, if it is configured.
            base_wd: the optimizer's weight decay, if it is configured.
            options: the names of the optimizer's arguments.

        Raises:
            ValueError: if a base is missing, or if an unknown setting of a custom key looks like a
                known one.
        """
        for rule in self._multipliers():
            name, base = ("lr", base_lr) if rule.endswith("lr_mult") else ("weight_decay", base_wd)
            if base is None:
                raise ValueError(f"{rule} multiplies {name}: the optimizer's must be configured")
        known = {"lr_mult", "decay_mult", *options} - {"params"}
        for key, settings in self.custom_keys.items():
            for name in settings:
                # Other names are allowed: schedulers and optimizers may look for them.
                near = [] if name in known else get_close_matches(name, known, n=1, cutoff=0.8)
                if near or name in ("params", "param_names"):
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise ValueError(f"custom_keys[{key!r}] cannot set {name!r}{hint}")

    def param_groups(self, model: nn.Module, base_lr: Any, base_wd: Any) -> list[ParamGroup]:
        """The trainable parameters of a model, those of equal settings in one group.

        Groups have ``param_names``: full names, without the parts that wrappers add.

        Args:
            model: may be wrapped.
            base_lr: the optimizer's learning rate; None leaves it out of the groups.
            base_wd: the optimizer's weight decay; None leaves it out of the groups.

        Raises:
            ValueError: if a parameter has two names for which the rules differ.
        """
        parameters = _named_parameters(model)
        offsets = {m for dcn in model.modules() if _is_dcn(dcn) for m in dcn.children()}
        singles, frozen, shared = [], [], []
        for names, owner, parameter in parameters:
            if not parameter.requires_grad:
                frozen.append(names[0])
                continue
            shared += names[1:]
            options = [
                self._options(name, owner, owner in offsets, parameter, base_lr, base_wd)
                for name in (names[:1] if self.bypass_duplicate else names)
            ]
            if different := [k for k, other in enumerate(options) if other != options[0]]:
                raise ValueError(
                    f"{names[0]!r} and {names[different[0]]!r} are one parameter, and the rules "
                    f"differ: {options[0]} and {options[different[0]]}; with bypass_duplicate=True "
                    "the first counts"
                )
            singles.append({"params": [parameter], "param_names": names[:1], **options[0]})
        _warn("have requires_grad=False and are not optimized", frozen)
        if self.bypass_duplicate:
            _warn("are other names of parameters, and the rules skip them", shared)
        self._warn_unmatched([name for names, _, _ in parameters for name in names])
        groups = reduce_param_groups(singles)
        _log(groups)
        return groups

    def _multipliers(self) -> dict[str, Any]:
        """All multipliers that are given, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_mult")}
        for key, settings in self.custom_keys.items():
            for name in ("lr_mult", "decay_mult"):
                if name in settings:
                    found[f"custom_keys[{key!r}].{name}"] = settings[name]
        return {rule: value for rule, value in found.items() if value is not None}

    def _options(
        self,
        name: str,
        owner: nn.Module,
        in_dcn: bool,
        parameter: nn.Parameter,
        base_lr: Any,
        base_wd: Any,
    ) -> dict[str, Any]:
        """The settings of a parameter under one of its names."""
        extra: dict[str, Any] = {}
        key = self._custom_key(name)
        if key is not None:
            extra = dict(self.custom_keys[key])
            lr_mult, decay_mult = extra.pop("lr_mult", None), extra.pop("decay_mult", None)
        else:
            lr_mult = self._lr_mult(name, owner, in_dcn)
            decay_mult = self._decay_mult(name, owner, in_dcn, parameter)
        options = {}
        # Settings that are the base's are written down too, so that equal groups look equal.
        if base_lr is not None:
            options["lr"] = base_lr if lr_mult is None else base_lr * lr_mult
        if base_wd is not None:
            options["weight_decay"] = base_wd if decay_mult is None else base_wd * decay_mult
        return {**options, **extra}

    def _custom_key(self, name: str) -> str | None:
        found = [key for key in self.custom_keys if key in _with_dot(name)]
        return min(found, key=lambda key: (-len(key), key), default=None)

    def _lr_mult(self, name: str, owner: nn.Module, in_dcn: bool) -> float | None:
        path, _, leaf = name.rpartition(".")
        is_offset = in_dcn and "conv_offset" in path and isinstance(owner, nn.Conv2d)
        if is_offset and self.dcn_offset_lr_mult is not None:
            return self.dcn_offset_lr_mult
        return self.bias_lr_mult if leaf == "bias" and not (_is_norm(owner) or in_dcn) else None

    def _decay_mult(
        self, name: str, owner: nn.Module, in_dcn: bool, parameter: nn.Parameter
    ) -> float | None:
        is_bias = name.rpartition(".")[2] == "bias"
        is_dwconv = isinstance(owner, nn.Conv2d) and owner.in_channels == owner.groups
        rules = (
            (_is_norm(owner), self.norm_decay_mult),
            (is_bias and not in_dcn, self.bias_decay_mult),
            (is_dwconv, self.dwconv_decay_mult),
            (parameter.ndim == 1 and not in_dcn, self.flat_decay_mult),
        )
        return next((mult for applies, mult in rules if applies and mult is not None), None)

    def _warn_unmatched(self, names: list[str]) -> None:
        parts = {name: None for full in names for name in (full, *_parents(full))}
        for key in self.custom_keys:
            if not any(key in _with_dot(name) for name in names):
                # No error: one configuration may serve several models.
                hint = did_you_mean(key, parts)
                logger.warning("custom_keys: %r is in no parameter's name%s", key, hint)


def _with_dot(name: str) -> str:
    return name if "." in name else f".{name}"


def _parents(name: str) -> Iterable[str]:
    """``"a.b.weight"`` to ``"a"``, ``"a.b"``."""
    parts = name.split(".")
    return (".".join(parts[:k]) for k in range(1, len(parts)))


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS)


def _is_dcn(module: nn.Module) -> bool:
    return any(base.__name__ in _DCN for base in type(module).__mro__)


def _warn(what: str, names: list[str]) -> None:
    if names:
        logger.warning("%d parameters %s: %s", len(names), what, _shortened(names))


def _log(groups: list[ParamGroup]) -> None:
    for group in groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        logger.info("parameters with %s: %s", options, _shortened(group["param_names"]))


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
