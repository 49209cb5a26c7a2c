"""Redirects the attention of ordinary models to attention over whole sequences, if positions are divided over ranks.

Models call one of two PyTorch functions for attention: ``scaled_dot_product_attention``, or
``multi_head_attention_forward`` (from ``nn.MultiheadAttention`` and the layers of ``nn.Transformer``). A
``TorchFunctionMode`` intercepts these calls, wherever the function was imported, and answers them by
:func:`evener.nn.attention.attention` with the same tensors and parameters.

Backward runs under the mode too, since activation checkpointing repeats forward there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evener.errors import ConfigurationError
from evener.nn.attention import attention_to
from evener.nn.context import divided
from evener.nn.masks import bias_of, understood
from evener.nn.sequence_layout import DividedSequence
from evener.torch_internals.autograd import run_backward, run_grad
from evener.torch_internals.compiling import outside_of_graphs


def attending(sequence: DividedSequence | None) -> AbstractContextManager[Any]:
    """Context in which PyTorch's attention functions attend over ``sequence``; no effect if it is None."""
    return _WHOLE if sequence is None else _Attending(sequence)


_WHOLE: AbstractContextManager[Any] = nullcontext()


def attend_within(model: nn.Module) -> None:
    """Registers hooks so that each forward of ``model`` runs inside :func:`attending`, also if the user's own training
    loop calls the model directly."""
    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)


_entered: list[tuple[nn.Module, AbstractContextManager[Any]]] = []
"""The forward calls that are under way with their contexts, the innermost last."""


def _enter(module: nn.Module, inputs: Any) -> None:
    entered = attending(divided())
    entered.__enter__()
    _entered.append((module, entered))


def _leave(module: nn.Module, inputs: Any, output: Any) -> None:
    if _entered and _entered[-1][0] is module:  # else the call has failed before it was entered
        _entered.pop()[1].__exit__(None, None, None)


class _Attending(TorchFunctionMode):
    def __init__(self, sequence: DividedSequence) -> None:
        super().__init__()
        self._sequence = sequence
        self._answers: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._scaled_dot_product,
            F.multi_head_attention_forward: self._multi_head,
            Tensor.backward: self._backward,
            torch.autograd.backward: self._backward,
            torch.autograd.grad: self._gradients,
        }

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._answers.get(func, func)(*args, **(kwargs or {}))

    @outside_of_graphs  # a graph cannot wait for other ranks
    def _scaled_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        check_dropout(dropout_p)
        if query.dim() < 3 or (key.shape[-3] != query.shape[-3] and not enable_gqa):
            raise ConfigurationError(
                f"scaled_dot_product_attention: queries {tuple(query.shape)}, keys {tuple(key.shape)}; under strategy "
                "'context' they must be (batch, heads, length, width)"
            )
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        bias = None
        if attn_mask is not None:
            is_causal, bias = understood(bias_of(attn_mask), q.shape, self._sequence)
        return attention_to(q, k, v, bias, is_causal, scale).reshape(*query.shape[:-1], value.shape[-1])

    @outside_of_graphs  # a graph cannot wait for other ranks
    def _multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        given = _MULTI_HEAD.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        _check_multi_head(call)
        heads, (q, k, v) = call["num_heads"], _projected(call)
        q, k, v = (torch.unflatten(x, -1, (heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
        mixed = multi_head_attention(
            q, k, v, self._sequence, call["attn_mask"], call["key_padding_mask"], call["is_causal"]
        )
        mixed = mixed.permute(2, 0, 1, 3).flatten(2)
        return F.linear(mixed, call["out_proj_weight"], call["out_proj_bias"]), None

    def _backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
        gradient: Tensor | None = None,
    ) -> None:
        """Stands for the function and the method of a tensor, which calls its ``grad_tensors`` ``gradient``."""
        given = gradient if grad_tensors is None else grad_tensors
        run_backward(self, tensors, given, retain_graph, create_graph, inputs)

    def _gradients(self, *args: Any, **kwargs: Any) -> Any:
        given = _GRADIENTS.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        if call["is_grads_batched"] or call["materialize_grads"] or isinstance(call["inputs"], dict):
            return torch.autograd.grad(*args, **kwargs)
        options = (call["retain_graph"], call["create_graph"], bool(call["allow_unused"]))
        return run_grad(self, call["outputs"], call["inputs"], call["grad_outputs"], *options)


_GRADIENTS = inspect.signature(torch.autograd.grad)
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def multi_head_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: DividedSequence,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Computes the attention of ``nn.MultiheadAttention``, between its projections: (batch, heads, length, width).

    Args:
        q: (batch, heads, length, width), as ``k`` and ``v``.
        sequence: The division of the positions over ranks.
        mask: As the module's ``attn_mask``.
        padding: As its ``key_padding_mask``, (batch, length).
        is_causal: True if the mask is causal; ``mask`` is then ignored.
    """
    causal, bias = is_causal, None
    if mask is not None and not causal:
        causal, bias = understood(bias_of(_inverted(mask)), q.shape, sequence)
    if padding is not None:
        hidden = bias_of(_inverted(padding)).to(q.dtype)
        bias = hidden if bias is None else bias + hidden
    return attention_to(q, k, v, bias, causal, None)


def check_dropout(rate: float) -> None:
    """Raises ConfigurationError if the dropout rate of attention weights is not 0."""
    if rate:
        raise ConfigurationError(
            f"attention drops its weights (dropout {rate}), of which each rank of strategy 'context' would draw its "
            "own; set this rate to 0 and use evener.nn.Dropout on what attention returns"
        )


def check_extra_keys(extra: Sequence[str]) -> None:
    """Raises ConfigurationError if ``extra``, the options of ``nn.MultiheadAttention`` that add keys, is not empty."""
    if extra:
        raise ConfigurationError(
            f"nn.MultiheadAttention with {' and '.join(extra)} adds keys of no position, which each rank of strategy "
            "'context' would count again; leave it out"
        )


def _check_multi_head(call: dict[str, Any]) -> None:
    check_dropout(call["dropout_p"] if call["training"] else 0.0)
    extra = [name for name in ("bias_k", "bias_v", "static_k", "static_v") if call[name] is not None]
    check_extra_keys([*extra, *["add_zero_attn"] * call["add_zero_attn"]])
    if call["query"].dim() != 3:
        raise ConfigurationError(
            f"nn.MultiheadAttention: queries {tuple(call['query'].shape)}; under strategy 'context' they must be a "
            "batch of sequences"
        )


def _projected(call: dict[str, Any]) -> list[Tensor]:
    """Returns queries, keys and values: (length, batch, width) each."""
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    separate = call["use_separate_proj_weight"]
    weights = [call[name] for name in names] if separate else call["in_proj_weight"].chunk(3)
    bias = call["in_proj_bias"]
    biases = [None] * 3 if bias is None else bias.chunk(3)
    inputs = (call["query"], call["key"], call["value"])
    return [F.linear(x, weight, b) for x, weight, b in zip(inputs, weights, biases, strict=True)]


def _inverted(mask: Tensor) -> Tensor:
    """Inverts a boolean mask of ``nn.MultiheadAttention``, which is True where a key is hidden."""
    return ~mask if mask.dtype == torch.bool else mask
