"""Checks of settings, alone and in combination. ``RunConfig`` runs them when it is created."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable
from numbers import Real
from pathlib import Path

from evener.core.config.offload import Offload
from evener.core.config.recompute import Recompute
from evener.core.config.strategy_names import DEVICES, hint_of_local_name
from evener.core.did_you_mean import did_you_mean
from evener.core.elsewhere import place_of
from evener.errors import ConfigurationError

REMEMBERING = (
    *("int8", "fp8", "top-k", "powersgd"),
    *("int8-between", "fp8-between", "top-k-between"),
)
"""Compressions with error feedback: they add what they did not send to later steps."""
GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that use CUDA graphs."""
MOST_SECONDS = 1e9
"""Longest time that may be set, about 30 years. PyTorch's and Python's waits overflow at some ten times as much."""
AUTOCASTS = ("fp32", "bf16", "fp16")
"""Precisions that ``precision_of`` may give a module."""


def check_settings(names: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigurationError if one of ``names`` is not a setting."""
    unknown = sorted({*names} - {*known})
    if unknown:
        ways = did_you_mean(unknown[0], known) or f"there are: {', '.join(known)}"
        raise ConfigurationError(f"no setting is called {', '.join(unknown)}; {ways}")


def at_least(name: str, value: int | None, least: int) -> None:
    """Raises ConfigurationError if ``value`` is not an integer from ``least`` to ``sys.maxsize``. Accepts None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if value > sys.maxsize:
        raise ConfigurationError(f"{name} is {value!r}; it must be at most {sys.maxsize}")


def number_or_auto(name: str, given: int | str | None, what: str, least: int) -> int | str | None:
    """Returns ``given`` as an integer (the command line gives it as text), or ``auto``, or None.

    Raises:
        ConfigurationError: If ``given`` is another text, or less than ``least``.
    """
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    if isinstance(number, str) and number != "auto":
        raise ConfigurationError(f"{name} is {given!r}; it must be a number of {what}, or auto")
    at_least(name, None if isinstance(number, str) else number, least)
    return number


def as_path(name: str, value: str | Path | None) -> Path | None:
    """Returns ``value`` as a path, that of the local directory for a URL.

    Raises:
        ConfigurationError: If it is empty, which would be the working directory, or a URL of what cannot lie elsewhere.
    """
    if value == "":
        kind = "file" if name in ("weights", "metrics_file") else "directory"
        raise ConfigurationError(f"{name} is empty; leave it out, or name a {kind}")
    return None if value is None else place_of(name, value)


def positive(name: str, value: object) -> None:
    """Raises ConfigurationError if ``value`` is not a finite number above 0. Accepts None."""
    number = math.nan if not isinstance(value, Real) else float(value)
    if value is not None and not 0 < number < math.inf:
        raise ConfigurationError(f"{name} is {value!r}; it must be a finite number above 0")


def positive_seconds(name: str, value: float) -> None:
    """Raises ConfigurationError if ``value`` is not a time above 0 that a wait can take. None is no time."""
    if value is None:
        raise ConfigurationError(f"{name} is None; give a number of seconds, or leave it out for the default")
    positive(name, value)
    if value > MOST_SECONDS:
        raise ConfigurationError(f"{name} is {value!r}; it must be at most {MOST_SECONDS:.0f} seconds")


def one_of(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Raises ConfigurationError if ``value`` is not one of ``choices``. Accepts None."""
    if value is not None and value not in choices:
        raise ConfigurationError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def check_best(metric: str | None) -> None:
    """Raises ConfigurationError if ``keep_best`` names no metric, or a direction other than min and max."""
    name, _, direction = (metric or "x").partition(":")
    if not name or direction not in ("", "min", "max"):
        raise ConfigurationError(f"keep_best is {metric!r}; write METRIC, METRIC:min or METRIC:max")


def check_metrics_file(path: Path | None) -> None:
    """Raises ConfigurationError if node_exporter would not read the file, since it reads ``*.prom`` only."""
    if path is not None and path.suffix != ".prom":
        raise ConfigurationError(
            f"metrics_file is {str(path)!r}; its name must end with .prom, since node_exporter reads no other files"
        )


def check_precision(
    dtype: str | None, precision: str | None, precision_of: tuple[str, ...], compress: str | None
) -> None:
    """Raises ConfigurationError if the precision settings are invalid or contradict ``dtype`` or ``compress``."""
    if dtype and (precision or precision_of):
        message = f"dtype {dtype} and precision both say what the model computes in"
        raise ConfigurationError(f"{message}: leave one out (bf16-true and fp16-true cast the weights too)")
    for text in precision_of:
        pattern, _, kind = text.rpartition("=")
        if not pattern or kind not in AUTOCASTS:
            raise ConfigurationError(
                f"precision_of {text!r} is not PATTERN=PRECISION, with one of {', '.join(AUTOCASTS)}"
            )
    if precision_of and str(precision).endswith("-true"):
        raise ConfigurationError(
            f"precision {precision} casts the whole model, so that precision_of would do nothing: with "
            f"precision {str(precision).removesuffix('-true')} modules may have one of their own"
        )
    scaled = precision == "fp16" or any(text.endswith("=fp16") for text in precision_of)
    if (scaled or precision == "auto") and compress in REMEMBERING:
        raise ConfigurationError(
            f"compress {compress!r} adds what it could not send to later steps, for which fp16 may have another "
            "scale: use precision bf16, or compress with fp16 or bf16"
        )


def check_device(kind: str | None) -> None:
    """Raises ConfigurationError if ``kind`` cannot be a kind of device. Checks no more, to avoid importing PyTorch."""
    if kind is not None and (here := hint_of_local_name(kind, "device")) and kind not in DEVICES:
        raise ConfigurationError(f"no device is called {kind!r}{here}")
    if kind is not None and (not re.fullmatch(r"[a-z]\w*", kind) or kind == "meta"):
        raise ConfigurationError(
            f"device is {kind!r}; it must be a type of device without an index: cpu, cuda (for AMD too), xpu, mps, "
            "another accelerator of torch, or mixed. Rank i of a machine uses device i"
        )


def check_recompute(recompute: str | None, compile: str | None) -> None:
    """Raises ConfigurationError for a budget together with compile: the budget measures single operators."""
    if recompute is not None and Recompute.parse(recompute).is_budget and compile is not None:
        raise ConfigurationError(
            f"recompute={recompute} is a budget, which is measured operator by operator, and compile hides these: "
            "compute all blocks again with recompute=blocks, or leave compile out"
        )


def check_offload(offload: Offload, recompute: str | None, compile_mode: str | None) -> None:
    """Raises ConfigurationError if activations are offloaded together with CUDA graphs or a recompute budget."""
    if offload.activations and compile_mode in GRAPHS:
        raise ConfigurationError(
            f"compile_mode {compile_mode} makes CUDA graphs, which know activations by their place: leave activations "
            "out of offload, or leave compile_mode out"
        )
    if offload.activations and recompute is not None and Recompute.parse(recompute).is_budget:
        raise ConfigurationError(
            f"recompute={recompute} is a budget, for which each block's memory is measured as if nothing were kept "
            "outside: compute all blocks again with recompute=blocks, or leave activations out of offload"
        )


def check_update_in_backward(
    clip_norm: float | None,
    non_finite: str,
    micro_batch: int | str | None,
    memory_limit: str | None,
    offload: Offload,
) -> None:
    """Raises ConfigurationError if another setting needs all gradients at once, or a step that can be undone."""
    against = {
        "clip_norm": (clip_norm, "the norm is that of all gradients"),
        "non_finite": (
            non_finite if non_finite != "stop" else None,
            "no update may be made before all are known",
        ),
        "micro_batch": (micro_batch, "the gradients of micro-batches add up, and are there between them"),
        "memory_limit": (
            memory_limit,
            "a step that runs out of memory is taken again, from the weights before it",
        ),
        "offload": (
            offload.words if offload.optimizer else None,
            "the optimizer's state comes back for many parameters at a time, when backward is over",
        ),
    }
    for name, (value, why) in against.items():
        if value is not None:
            raise ConfigurationError(
                f"update_in_backward frees a gradient before the next is there, and {name}={value} cannot be so: "
                f"{why}; leave one out"
            )


def check_compile(compile: str | None, mode: str | None, backend: str, usual_backend: str) -> None:
    """Raises ConfigurationError if a mode or backend is given without ``compile``."""
    if compile is None and (mode or backend != usual_backend):
        message = "compile_mode and compile_backend would do nothing"
        raise ConfigurationError(f"{message}: set compile too, or leave them out")


def check_on_replica_mismatch(on_replica_mismatch: str | None, check_replicas: int | None) -> None:
    """Raises ConfigurationError if ``on_replica_mismatch`` is set but replicas are never compared."""
    if on_replica_mismatch and check_replicas == 0:
        raise ConfigurationError(
            f"on_replica_mismatch={on_replica_mismatch} would do nothing with check_replicas=0; leave one out"
        )


def check_non_finite(non_finite: str, compress: str | None) -> None:
    """Raises ConfigurationError if a run goes on after steps that are not finite, with error feedback in
    compression."""
    if non_finite != "stop" and compress in REMEMBERING:
        raise ConfigurationError(
            f"compress {compress!r} sends in later steps what it could not send in a step, and after one that "
            f"is not finite never sends a number again: non_finite={non_finite} goes with none, fp16 or bf16"
        )


def check_lean(lean: bool, non_finite: str, precision: str | None, exact: str) -> None:
    """Raises ConfigurationError if a lean run is to decide by gradients, at which it does not look."""
    asked = {
        f"non_finite={non_finite}": non_finite != "stop",
        f"precision={precision}": precision in ("fp16", "fp16-true"),
        f"exact={exact}": exact != "sums",
    }
    for what in (what for what, is_asked in asked.items() if lean and is_asked):
        raise ConfigurationError(
            f"lean looks at no gradient, and {what} decides by them whether a step counts: leave one of them out"
        )
