"""Optimizer state in 8 bits: what it is on disk, and how a task's optimizer gets it.

Adam's two averages are kept as codes of 8 bits with a scale for every 256 numbers (Dettmers and others, ICLR 2022,
https://arxiv.org/abs/2110.02861), by torchao: 2 bytes a parameter in place of 8. A checkpoint holds the numbers that
the codes stand for, as any strategy and the plain optimizer take them. Codes are made of them again when it is read::

    codes, scales ─ dequantize ─▶ numbers, in float32 ─▶ checkpoint ─▶ this rank's piece ─ quantize ─▶ codes, scales

The way back has to come to the same bits, or a run that goes on would not be the run that was stopped. A scale is the
largest magnitude of its block, and the largest number of the table is 1, so that it is found again; but not where that
magnitude was a negative number's. The lowest of the table is -0.993, what comes back is a little less than the scale,
and all codes of the block would come out otherwise. There the scale is worked out from that lowest number, up to an
ulp, which is found by trying.
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
from evener.components.sharded_tensor.shard_spec import slice_of
from evener.errors import ConfigurationError
from evener.torch_internals.fake_tensors import active_fake_mode, without_fakes
from evener.torch_internals.optimizer_hooks import has_step_hooks
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
"""What an optimizer keeps of a parameter in codes, and whether it may be negative."""
_FIRST = "exp_avg"
_STANDS_FOR = "evener_stands_for"
_KEPT = ("lr", "betas", "eps", "weight_decay", "amsgrad")
"""Options of a group that the optimizer with fewer bits has too."""


def plain(value: Any) -> Any:
    """The numbers that ``value`` stands for, as a tensor without codes; anything else as it is."""
    return value.dequantize() if is_quantized(value) else value


def kept_as(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, value: Any) -> Any:
    """``value``, numbers of the shape of ``parameter``, in the form in which the optimizer keeps its state ``key``."""
    if not makes_quantized(optimizer) or key not in _SIGNED or value.shape != parameter.shape:
        return value
    kept = new_state(optimizer, parameter, _SIGNED[key])
    with torch.no_grad():
        write(local(kept), local(value).to(parameter.device))
    return kept


def write(kept: Tensor, numbers: Tensor) -> None:
    """Writes numbers into ``kept``; those that some codes stood for become these codes again."""
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
        # The lowest number as it was before it was rounded to the table's, so that it gives the scale.
        given = torch.where(wrong, torch.where(blocks == least, -tried, blocks), given)
        kept.copy_(given.view_as(numbers))
    # What is left was never codes, or those of other blocks.
    kept.copy_(torch.where(_differ(kept, blocks), blocks, given).view_as(numbers))


def _differ(kept: Tensor, blocks: Tensor) -> Tensor:
    said: Tensor = plain(kept)
    return (said.view_as(blocks) != blocks).any(1, keepdim=True)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class, or the one whose place it has taken."""
    return str(getattr(optimizer, _STANDS_FOR, type(optimizer).__name__))


def stepping(optimizer: torch.optim.Optimizer, device: torch.device) -> AbstractContextManager[Any]:
    """Around its step. torchao compiles the update for each shape: on a CPU, where that takes seconds and a compiler,
    and where memory is estimated, its operators run one by one."""
    if not makes_quantized(optimizer) or _compiles(device):
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


def _compiles(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta") and active_fake_mode() is None


def words_of(optimizer: torch.optim.Optimizer) -> str:
    """What keeps the state, for the record; empty for an optimizer that keeps numbers as they are."""
    if not makes_quantized(optimizer):
        return ""
    instead = getattr(optimizer, _STANDS_FOR, "")
    whose = f", in the place of {instead}" if instead else ""
    kept = [local(entries[_FIRST]) for entries in optimizer.state.values() if _FIRST in entries]
    how_many = f", for {sum(map(is_quantized, kept))} of {len(kept)} parameters" if kept else ""
    return f"optimizer state in few bits: {type(optimizer).__name__} of torchao{whose}{how_many}"


def has_other_blocks(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether numbers share a scale with others than they would on one device."""
    return makes_quantized(optimizer) and any(slice_of(p) is not None for p in model.parameters())


def in_eight_bits(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer with state in 8 bits.

    Raises:
        ConfigurationError: If there is none, or torchao is not installed.
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
    with warnings.catch_warnings(action="ignore"):  # of torchao's own, and nothing that a user can do
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
    """Looks at optimizers that keep their state in few bits, whoever made them, and has the tables of their codes made:
    by tensors without numbers, as those of an estimate are, they would be wrong in all that follows in the process.

    Args:
        device: Of the rank.
        divides: Whether ranks hold pieces of parameters.

    Raises:
        ConfigurationError: If the ranks would come apart, or the state could not be saved as one.
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
