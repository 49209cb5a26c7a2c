"""Optimizer state in 8 bits: converts a task's optimizer, and saves and loads its state.

torchao stores Adam's two averages as 8-bit codes with a scale for every 256 numbers (Dettmers and others, ICLR 2022,
https://arxiv.org/abs/2110.02861): 2 bytes per parameter instead of 8. A checkpoint holds the dequantized numbers, which
any strategy and the plain optimizer can load. Loading quantizes them again::

    codes, scales ─ dequantize ─▶ numbers, in float32 ─▶ checkpoint ─▶ this rank's piece ─ quantize ─▶ codes, scales

Loading must restore the same bits, or a resumed run would differ from an uninterrupted one. A scale is the largest
magnitude of its block. The largest code stands for 1, so that dequantized numbers contain the scale, and it is found
again. This fails if the largest magnitude belongs to a negative number: the lowest code stands for -0.993, the
dequantized number is slightly smaller than the scale, and all codes of the block would change. In this case the scale
is computed from that lowest number, up to an ulp, which is found by trying.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.sharded_tensor.local import is_divided, local
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.errors import ConfigurationError
from evener.torch_internals.dispatch import active_fake_mode, without_fakes
from evener.torch_internals.optimizers import has_step_hooks
from evener.torch_internals.quantized_state import (
    block_size,
    is_quantized,
    lowest_code,
    make_tables,
    makes_quantized,
    new_state,
    rounds_by_chance,
)

EIGHT_BITS = "8bit"
_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""The states that an optimizer keeps as codes, and whether they may be negative."""
_FIRST = "exp_avg"
_STANDS_FOR = "evener_stands_for"
_KEPT = ("lr", "betas", "eps", "weight_decay", "amsgrad")
"""Options of a group that the 8-bit optimizer has too."""


def plain(value: Any) -> Any:
    """Returns a quantized tensor dequantized, and anything else unchanged."""
    return value.dequantize() if is_quantized(value) else value


def kept_as(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, value: Any) -> Any:
    """Returns ``value``, a tensor of the same shape as ``parameter``, in the form in which the optimizer keeps state
    ``key``."""
    if not makes_quantized(optimizer) or key not in _SIGNED or value.shape != parameter.shape:
        return value
    kept = new_state(optimizer, parameter, _SIGNED[key])
    with torch.no_grad():
        write(local(kept), local(value).to(parameter.device))
    return kept


def write(kept: Tensor, numbers: Tensor) -> None:
    """Writes ``numbers`` into ``kept``. Numbers that were dequantized from codes become the same codes again."""
    kept.copy_(numbers)
    lowest = lowest_code(kept) if is_quantized(kept) else None
    if lowest is None:
        return
    blocks = numbers.reshape(-1, block_size(kept))
    least = blocks.amin(1, keepdim=True)
    scale, given = least / lowest, blocks
    for tried in (scale, scale.nextafter(2 * scale), scale.nextafter(0 * scale)):
        wrong = _differ(kept, blocks)
        if not wrong.any():
            return
        # Restores the lowest number from before quantization, which gives the scale.
        given = torch.where(wrong, torch.where(blocks == least, -tried, blocks), given)
        kept.copy_(given.view_as(numbers))
    # The remaining blocks were never quantized, or in other blocks.
    kept.copy_(torch.where(_differ(kept, blocks), blocks, given).view_as(numbers))


def _differ(kept: Tensor, blocks: Tensor) -> Tensor:
    said: Tensor = plain(kept)
    return (said.view_as(blocks) != blocks).any(1, keepdim=True)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of the optimizer's class, or of the class that it has replaced."""
    return str(getattr(optimizer, _STANDS_FOR, type(optimizer).__name__))


def stepping(optimizer: torch.optim.Optimizer, device: torch.device) -> AbstractContextManager[Any]:
    """Context for the optimizer's step. torchao compiles its update for each shape. Compilation is disabled on a CPU,
    where it takes seconds and needs a compiler, and in a memory estimate."""
    if not makes_quantized(optimizer) or _compiles(device):
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


def _compiles(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta") and active_fake_mode() is None


def words_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns a text for the record that tells which optimizer keeps quantized state; "" if the state is not
    quantized."""
    if not makes_quantized(optimizer):
        return ""
    instead = getattr(optimizer, _STANDS_FOR, "")
    whose = f", in the place of {instead}" if instead else ""
    kept = [local(entries[_FIRST]) for entries in optimizer.state.values() if _FIRST in entries]
    how_many = f", for {sum(map(is_quantized, kept))} of {len(kept)} parameters" if kept else ""
    return f"optimizer state in few bits: {type(optimizer).__name__} of torchao{whose}{how_many}"


def has_other_blocks(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Returns True if quantization blocks differ from those on one device, because parameters are divided."""
    return makes_quantized(optimizer) and any(shard_spec(p) is not None for p in model.parameters())


def in_eight_bits(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the same optimizer with state in 8 bits.

    Raises:
        ConfigurationError: If there is no such optimizer, or torchao is not installed.
    """
    _check_can_be(optimizer)
    decays = {bool(group["decoupled_weight_decay"]) for group in optimizer.param_groups}
    if len(decays) > 1:
        raise ConfigurationError(
            f"optimizer_state={EIGHT_BITS} makes one optimizer of the task's, whose groups are Adam's and AdamW's "
            "mixed: let decoupled_weight_decay be the same in all"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigurationError(
            f"optimizer_state={EIGHT_BITS} needs torchao, which is not installed: pip install torchao"
        )
    with warnings.catch_warnings(action="ignore"):  # torchao's import warnings, which a user cannot fix
        optim = importlib.import_module("torchao.optim")
    groups = [
        {"params": group["params"], **{key: group[key] for key in _KEPT}} for group in optimizer.param_groups
    ]
    made: torch.optim.Optimizer = (optim.AdamW8bit if decays.pop() else optim.Adam8bit)(groups)
    setattr(made, _STANDS_FOR, type(optimizer).__name__)
    return made


def _check_can_be(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigurationError(
            f"optimizer_state={EIGHT_BITS} is for torch.optim.Adam and AdamW, and the task's optimizer is "
            f"{kind.__module__}.{kind.__name__}: leave it out, and let Task.optimizer return one that keeps its state "
            "in 8 bits itself, of torchao.optim"
        )
    for name in ("maximize", "differentiable"):
        if any(group[name] for group in optimizer.param_groups):
            raise ConfigurationError(
                f"optimizer_state={EIGHT_BITS} goes without {name}, which the task's {kind.__name__} sets: leave one "
                "out"
            )
    if has_step_hooks(optimizer):
        raise ConfigurationError(
            f"optimizer_state={EIGHT_BITS} puts another optimizer in the place of the task's, whose step hooks would "
            "be lost: let Task.optimizer return one of torchao.optim, with the hooks"
        )
    odd = [p for group in optimizer.param_groups for p in group["params"] if not p.is_floating_point()]
    if odd:
        raise ConfigurationError(
            f"optimizer_state={EIGHT_BITS} keeps real numbers, and a parameter of shape {tuple(odd[0].shape)} is "
            f"{odd[0].dtype}: leave it out"
        )


def check_state(optimizer: torch.optim.Optimizer, device: torch.device, divides: bool, ranks: int) -> None:
    """Checks optimizers with quantized state, whoever made them, and creates torchao's code tables. A memory estimate
    would create the tables as fake tensors, which would be wrong for the rest of the process.

    Args:
        device: The rank's device.
        divides: True if ranks hold shards of parameters.
        ranks: The number of ranks.

    Raises:
        ConfigurationError: If replicas would drift apart, or the state could not be saved as a whole.
    """
    if divides and any(base.__module__.startswith("bitsandbytes") for base in type(optimizer).__mro__):
        raise ConfigurationError(
            f"{type(optimizer).__name__} of bitsandbytes keeps scales of which nobody knows to which rows they belong, "
            "so that its state cannot be divided: use torchao's, as optimizer_state=8bit does, or strategy 'ddp'"
        )
    if makes_quantized(optimizer):
        with without_fakes():
            make_tables(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    odd = [p.dtype for p in held if is_divided(p) and p.dtype is not torch.float32]
    if odd and makes_quantized(optimizer) and not _compiles(device):
        raise ConfigurationError(
            f"{type(optimizer).__name__} of torchao updates what PyTorch's FSDP2 divides in float32 alone where it is "
            f"not compiled, as on a CPU, and weights are {odd[0]}: say dtype float32 or precision bf16, or "
            "strategy_option zero=2"
        )
    if ranks > 1 and rounds_by_chance(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} rounds by chance (bf16_stochastic_round), each rank by its own random "
            "numbers, so that replicas would come apart: leave it out, or train on one rank"
        )
