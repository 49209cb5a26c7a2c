"""Load-balancing loss of a mixture of experts, computed over the tokens of all ranks.

A mixture whose config has ``output_router_logits`` adds c A to the mean over labels, with (Fedus, Zoph and Shazeer,
"Switch Transformers", 2021, equations 4 to 6)::

    A = E sum over e of f_e P_e        f_e: part of all tokens that expert e was chosen for, of all layers together
                                       P_e: mean of its probability

f has no gradient, and P is a mean over tokens. So A is a sum over tokens, once f and the number of tokens of the whole
batch are known. For that, the ranks all-reduce E + 2 numbers. With micro-batches, A is computed for each micro-batch,
and these values are weighted by the number of labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evener.core.losses import Loss
from evener.core.task.task import call_model
from evener.errors import LossError
from evener.integrations.hf_outputs import logits
from evener.nn import all_reduce, data_group
from evener.nn.context import current

ROUTERS, MASK = "router_logits", "attention_mask"


def balanced(model: nn.Module, tokens: Loss, smoothed: bool) -> Loss:
    """Returns ``tokens``, with the load-balancing loss added if the model adds one to its own loss.

    Returns ``tokens`` alone if labels are smoothed: ``transformers.Trainer`` then computes the loss outside of the
    model, without the load-balancing loss.
    """
    config: Any = getattr(model, "config", None)
    coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    if smoothed or not coefficient or not getattr(config, "output_router_logits", False):
        return tokens
    chosen: Any = getattr(model, "num_experts_per_tok", None) or getattr(config, "num_experts_per_tok", 2)
    return BalancedLoss(tokens, coefficient, int(chosen))


class BalancedLoss(Loss):
    """Mean over labels, plus the load-balancing loss over all tokens of the batch.

    Args:
        tokens: The loss of the labels.
        coefficient: The factor c of the load-balancing loss.
        chosen: Experts per token.
    """

    def __init__(self, tokens: Loss, coefficient: float, chosen: int) -> None:
        self.tokens, self._coefficient, self._chosen = tokens, coefficient, chosen

    def count(self, targets: Any) -> Any:
        return self.tokens.count(targets)

    def total(self, outputs: Any, targets: Any) -> Tensor:
        total: Tensor = self.tokens.total(outputs["logits"], targets)
        assigned, probability, rows = self._routed(outputs)
        labels = torch.as_tensor(float(self.tokens.count(targets)), device=rows.device, dtype=rows.dtype)
        own = torch.cat([assigned, rows.reshape(1), labels.reshape(1)])
        scope = current()
        if scope is not None and scope.weight == 0:
            own = torch.zeros_like(own)  # a placeholder batch does not count
        whole = all_reduce(own, data_group(), replicated=True)
        experts, (rows, labels) = len(assigned), whole[-2:]
        if not rows:
            return total
        balance = experts * (whole[:experts] / rows * probability / rows).sum()
        share: Tensor = self._coefficient * labels * balance
        return total + share.to(total.dtype)

    def _routed(self, outputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns, for this rank's tokens: how often each expert was chosen, its summed probabilities, and their
        number.

        A token counts once per layer.
        """
        layers, mask = outputs[ROUTERS], outputs[MASK]
        assigned, probability, rows = [], [], []
        for scores in layers:
            routed = scores.softmax(-1)
            weight = torch.ones(len(routed)) if mask is None else mask.reshape(-1)
            weight = weight.to(routed)
            if len(weight) != len(routed):
                raise LossError(
                    f"the routers have scores of {len(routed)} tokens and the attention mask of {len(weight)}: the "
                    "balance loss cannot tell which of them count; give Trainer(loss=...)"
                )
            hits = torch.zeros_like(routed).scatter_(1, routed.topk(self._chosen, -1).indices, 1.0)
            assigned.append((hits * weight[:, None]).sum(0))
            probability.append((routed * weight[:, None]).sum(0))
            rows.append(weight.sum())
        return torch.stack(assigned).sum(0).detach(), torch.stack(probability).sum(0), torch.stack(rows).sum()


def with_routers(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Calls the model and returns the inputs of `BalancedLoss`: logits, router scores per layer, attention mask.

    Raises:
        LossError: If the model returned no router scores.
    """
    outputs: Any = call_model(model, inputs)
    found = getattr(outputs, ROUTERS, None)
    if not isinstance(found, tuple | list) or not all(isinstance(each, Tensor) for each in found):
        raise LossError(
            f"{type(model).__name__} has output_router_logits in its config and returned no {ROUTERS}, of which its "
            "balance loss is made: set config.output_router_logits=False, or give Trainer(loss=...)"
        )
    return {"logits": outputs.logits, ROUTERS: tuple(found), MASK: inputs.get(MASK)}


def forward_for(loss: Loss) -> Callable[[nn.Module, Any], Any]:
    """Returns the ``forward`` of a task with this loss: it returns the outputs that the loss takes."""
    return with_routers if isinstance(loss, BalancedLoss) else logits
