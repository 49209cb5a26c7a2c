"""The precision in which a model computes: for the whole run, and for single modules.

=============  ===========  ==================================  ===========================
name           weights      forward and backward                sums of gradients
=============  ===========  ==================================  ===========================
``fp32``       float32      float32                             float32
``tf32``       float32      float32; products of a GPU keep 10  float32
                            bits of their factors' mantissas
``bf16``       float32      bfloat16, by autocast               float32
``fp16``       float32      float16, by autocast; the loss is   float32
                            scaled
``bf16-true``  bfloat16     bfloat16                            float32, rounded once
``fp16-true``  float16      float16                             float32, rounded once
=============  ===========  ==================================  ===========================

PyTorch's autocast chooses the type of each operation. It ends with the model: outputs in half precision are converted
to float32, and loss, metrics and counts are computed in float32.

The precision replaces the ``forward`` of the model and of the named modules. So a loop of the user's own calls the
model in the same precision as the engine.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.amp.device_kinds import autocast_kinds
from evener.components.model_init import in_type
from evener.components.offload.activations import OffloadedForward as SavingForward
from evener.core.half_precision import widened
from evener.core.types import Forward, Tree
from evener.data.batch import map_leaves
from evener.errors import ConfigurationError
from evener.nn.fqn import clean_name

_COMPUTES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WHOLE = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}


Rule = tuple[str, str]
"""A pattern of module names, and a precision."""


@dataclass(frozen=True)
class Precision:
    """The precision of a model."""

    name: str | None = None
    """A name from the table. None leaves the model unchanged."""
    modules: tuple[Rule, ...] = ()
    """Modules that compute in ``fp32``, ``bf16`` or ``fp16``. A rule applies to submodules too. If several patterns
    match a module or its parents, the last one counts."""

    @classmethod
    def from_settings(cls, name: str | None, modules: tuple[str, ...]) -> Precision:
        """Parses ``PATTERN=PRECISION`` texts, which the settings have already checked."""
        pairs = (text.rpartition("=") for text in modules)
        return cls(name, tuple((pattern, kind) for pattern, _, kind in pairs))

    @property
    def weights(self) -> torch.dtype | None:
        """The type of the weights. None keeps the types of the model."""
        return _WHOLE.get(self.name or "")

    @property
    def is_scaled(self) -> bool:
        """True if gradients pass through float16, so that the loss must be scaled to keep small ones."""
        return "fp16" in (self.name, *(kind for _, kind in self.modules))

    @property
    def coarsest(self) -> torch.dtype:
        """The least precise type in which anything is computed."""
        found = [
            self.weights,
            *(_COMPUTES.get(kind) for kind in (self.name or "", *(k for _, k in self.modules))),
        ]
        return max(
            (dtype for dtype in found if dtype), key=lambda each: torch.finfo(each).eps, default=torch.float32
        )

    @property
    def words(self) -> str:
        """A text for the user and the record of a run; empty if no precision was chosen."""
        if self.name is None and not self.modules:
            return ""
        own = "".join(f", {pattern} {kind}" for pattern, kind in self.modules)
        return f"{self.name or 'as the model is'}{own}"

    def apply(self, model: nn.Module, caches: bool = True) -> ModulePrecision:
        """Replaces ``forward`` of the model and of the named modules by versions that compute in their precision.

        Args:
            caches: True if autocast may cache cast weights until the model's forward ends. False if a rank never has
                memory for all of them.

        Returns:
            The modules found for the patterns, to check later that they were called.

        Raises:
            ConfigurationError: If a pattern matches no module, or only lists without ``forward``, or if weights have a
                type that autocast would not cast.
        """
        if (self.name and not self.weights) or self.modules:
            self._check_weights(model)
        found = self._found(model)
        put: dict[str, list[_Forward]] = {}
        for module, (pattern, kind) in found:
            put.setdefault(pattern, []).append(_put(module, Within(_COMPUTES.get(kind), None, caches)))
        if self.name in _COMPUTES or self.weights:
            _put(model, self._whole(caches))
        return ModulePrecision(put)

    def around(self, forward: Forward, caches: bool = True) -> Forward:
        """Wraps ``Task.forward`` in the precision of the whole model, because it need not call the model as a whole."""
        return _Around(self._whole(caches), forward) if self.name in _COMPUTES or self.weights else forward

    def _whole(self, caches: bool) -> Within:
        return Within(_COMPUTES.get(self.name or ""), self.weights, caches, outermost=True)

    def _found(self, model: nn.Module) -> list[tuple[nn.Module, Rule]]:
        """Returns the modules whose precision differs from that of their caller."""
        known = {clean_name(name): module for name, module in model.named_modules() if name}
        for pattern, _ in self.modules:
            fitting = fnmatch.filter(known, pattern)
            if all(_is_list(known[name]) for name in fitting):
                raise ConfigurationError(_no_module(pattern, fitting, list(known)))
        rules = {name: self._rule_of(name) for name in known}
        return [
            (known[name], rule)
            for name, rule in rules.items()
            if rule and not _is_list(known[name]) and rule != rules.get(_caller(name, known))
        ]

    def _rule_of(self, name: str) -> Rule | None:
        """Returns the rule for a module of that name. Returns None if the model's precision applies."""
        parts = name.split(".")
        with_parents = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        return next((rule for rule in reversed(self.modules) if fnmatch.filter(with_parents, rule[0])), None)

    def _check_weights(self, model: nn.Module) -> None:
        trained = {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        others = [name for name, p in trained.items() if p.is_floating_point() and p.dtype != torch.float32]
        if others:
            kind = str(trained[others[0]].dtype).removeprefix("torch.")
            raise ConfigurationError(
                f"precision {self.words} is that of a model whose trained weights are of float32, and {others[0]} is "
                f"of {kind}{f', and {len(others) - 1} more are not' if len(others) > 1 else ''}. Make the model in "
                "float32, or leave precision out"
            )


@dataclass(frozen=True)
class Within:
    """Runs a function in a precision.

    Raises:
        ConfigurationError: If inputs are complex and there is no complex type of this precision.
    """

    computes: torch.dtype | None
    """The type for autocast. None means float32."""
    takes: torch.dtype | None
    """The type to which floating-point inputs are converted, if the weights have it. None leaves them to autocast."""
    caches: bool = True
    outermost: bool = False
    """True for the whole model, whose outputs are converted to float32."""

    def __call__(self, function: Callable[..., Any], home: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kinds = autocast_kinds(home)
        inside = not self.outermost and any(map(torch.is_autocast_enabled, kinds))
        args, kwargs = map_leaves(self._taken, args), map_leaves(self._taken, kwargs)
        with ExitStack() as undo:
            for kind in kinds if self.takes is None else ():
                undo.enter_context(self._autocast(kind))
            found = function(*args, **kwargs)
        return found if inside else map_leaves(widened, found)

    def _autocast(self, kind: str) -> torch.autocast:
        return torch.autocast(kind, self.computes or torch.float32, self.computes is not None, self.caches)

    def _taken(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self.takes is not None:
            return leaf.to(in_type(leaf, self.takes))
        return leaf if self.computes is not None else widened(leaf)


@dataclass(frozen=True)
class _Around:
    """``Task.forward`` in a precision."""

    within: Within
    forward: Forward

    def __call__(self, model: nn.Module, inputs: Any) -> Tree:
        return self.within(self.forward, model, model, inputs)


class _Forward:
    """Replaces the ``forward`` of a module."""

    def __init__(self, within: Within, module: nn.Module) -> None:
        self.within, self.module, self.inner, self.called = within, module, module.forward, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        return self.within(self.inner, self.module, *args, **kwargs)


def own_forward(module: nn.Module) -> Any:
    """Returns the original ``forward`` of a module, without the wrappers for precision and offload."""
    found = module.forward
    while isinstance(found, _Forward | SavingForward):
        found = found.inner
    return found


class ModulePrecision:
    """The modules that have a precision of their own, by pattern."""

    def __init__(self, forwards: Mapping[str, Sequence[_Forward]]) -> None:
        self._forwards = forwards

    def check(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Checks after the first step that each pattern's modules were called. Otherwise their precision would have no
        effect, without an error.

        Args:
            gather: Gathers a list of every rank; a collective call.

        Raises:
            ConfigurationError: If no rank has called any module of a pattern. Names the pattern.
        """
        if not self._forwards:
            return
        idle = [pattern for pattern, each in self._forwards.items() if not any(one.called for one in each)]
        never = set.intersection(*map(set, gather(idle)))
        if never:
            raise ConfigurationError(
                f"precision_of names {', '.join(sorted(never))}, which no rank has called in a step, so that its "
                "precision does nothing: what is around it uses its weights, or a strategy has cut it open, and its "
                "forward is not run. Name the module around it, or those in it"
            )


def _put(module: nn.Module, within: Within) -> _Forward:
    module.forward = made = _Forward(within, module)
    return made


def _caller(name: str, known: Mapping[str, nn.Module]) -> str:
    """Returns the name of the module that calls the given one. Skips lists of modules, which call nothing."""
    parent = name.rpartition(".")[0]
    return _caller(parent, known) if parent and _is_list(known[parent]) else parent


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _no_module(pattern: str, lists: list[str], known: list[str]) -> str:
    if lists:
        return (
            f"precision_of names {pattern!r}, which is a list of modules that is never called itself: name what is in "
            f"it, as {lists[0]}.*"
        )
    shown = ", ".join(known[:8]) + (f", ... ({len(known)} in all)" if len(known) > 8 else "")
    return f"precision_of names {pattern!r}, which fits no module of the model; there are {shown}"


@contextmanager
def products_of(name: str | None) -> Iterator[None]:
    """Sets the precision of float32 products on a GPU within the block: full precision for ``fp32``, 10 mantissa bits
    of the factors for ``tf32``.

    By default, PyTorch uses full precision in matrix products and 10 bits in convolutions. The setting applies to the
    whole process, and is restored at the end.
    """
    if name not in ("fp32", "tf32"):
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    _set_products("high" if name == "tf32" else "highest", name == "tf32")
    try:
        yield
    finally:
        _set_products(*before)


def _set_products(matrices: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(matrices)
    torch.backends.cudnn.allow_tf32 = convolutions


def able(device: torch.device) -> tuple[str, ...]:
    """Returns the precisions that a device supports. The first is the one that ``auto`` chooses."""
    if device.type == "cpu":
        return _able_cpu()
    return _able_gpu(device) if device.type == "cuda" else _able_other()


def _able_gpu(device: torch.device) -> tuple[str, ...]:
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    ampere = torch.cuda.get_device_capability(device) >= (8, 0) and torch.version.hip is None
    names = ("bf16", "bf16-true") if has_bfloat16 else ()
    return (*names, "fp16", "fp16-true", "fp32", *(("tf32",) if ampere else ()))


def _able_other() -> tuple[str, ...]:
    """Returns the precisions of other devices. Their speeds are unknown, so that float32 comes first."""
    return ("fp32", "bf16", "bf16-true", "fp16", "fp16-true")


def _able_cpu() -> tuple[str, ...]:
    """Returns the precisions of a CPU. With AMX matrix units bfloat16 is several times as fast as float32, and comes
    first; without, it is no faster."""
    both = ("fp32", "bf16") if "amx_bf16" not in _cpu_flags() else ("bf16", "fp32")
    return (*both, "bf16-true", "fp16", "fp16-true")


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as file:
            return next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        return set()


def agreed(precision: Precision, of_ranks: list[tuple[str, ...]]) -> Precision:
    """Returns the precision for all ranks.

    Args:
        of_ranks: The result of :func:`able` on each rank.

    Raises:
        ConfigurationError: If the device of a rank does not support the precision.
    """
    if precision.name == "auto":
        return dataclasses.replace(precision, name=_best(of_ranks))
    for asked in filter(None, (precision.name, *(kind for _, kind in precision.modules))):
        lacking = [rank for rank, able_ in enumerate(of_ranks) if asked not in able_]
        if lacking:
            raise ConfigurationError(
                f"precision {asked} is not one that the device of rank {lacking[0]} computes in; it has "
                f"{', '.join(of_ranks[lacking[0]])}"
            )
    return precision


def _best(of_ranks: list[tuple[str, ...]]) -> str:
    """Returns the first choice if it is the same on all ranks; float16 if only some GPUs lack bfloat16; else
    float32."""
    wanted = {able_[0] for able_ in of_ranks}
    if len(wanted) == 1:
        return wanted.pop()
    return "fp16" if wanted == {"bf16", "fp16"} else "fp32"
