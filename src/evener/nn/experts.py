"""Mixture of experts: a layer that sends each token to a few experts, which may be divided over ranks.

A router gives every token a probability for each expert. The ``top`` largest select the token's experts and weigh their
outputs (Shazeer et al., "Outrageously large neural networks", 2017; Fedus, Zoph and Shazeer, "Switch Transformers",
2022)::

    y = Σ p_e expert_e(x)        over the experts e that x has chosen

If the experts are divided, each rank routes the tokens of its own samples, sends them to the ranks that hold the chosen
experts, and receives the outputs (:func:`evener.nn.all_to_all`, whose backward sends the gradients the other way)::

    rank 0   tokens ─ route ─┐            ┌─ experts 0 1 ─┐            ┌─ weigh and add
                             ├ all_to_all ┤               ├ all_to_all ┤
    rank 1   tokens ─ route ─┘            └─ experts 2 3 ─┘            └─ weigh and add

A divided expert sees the tokens of all ranks, so the rank that holds it has its whole gradient. The balance of the
experts and the choice of dropped tokens depend on the whole batch, so they are computed from the tokens of all ranks,
also if the experts are not divided. So the layer gives the same result however the batch is divided. No choice depends
on the order of tokens or on rounding: scores that differ by no more than a possible rounding error count as equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.errors import ConfigurationError
from evener.nn.collectives import all_reduce, all_to_all
from evener.nn.collectives_no_grad import gathered
from evener.nn.context import data_group, without_placeholder
from evener.nn.unowned import Shared

STACKED = ("up", "up_bias", "down", "down_bias")
"""The parameters that hold all experts stacked along dimension 0."""


class Mixed(NamedTuple):
    """The result of :class:`Experts`."""

    output: Tensor
    """(samples, ..., width), as the input."""
    balance: Tensor
    """The imbalance of the experts' use by the tokens of all ranks, 0-d: 1 if even, up to the number of experts if all
    tokens go to one. Added to the loss, it keeps experts from lying idle (see :class:`Experts`)."""
    dropped: Tensor
    """The fraction of all ranks' choices that exceeded the capacity, 0-d, without gradient."""


class _Choice(NamedTuple):
    """The experts that this rank's tokens have chosen; each tensor is (tokens, top)."""

    weights: Tensor
    experts: Tensor
    priorities: Tensor
    """``log(weight / (1 - weight))``, the score of the expert against all others: ordered as the weights, but also
    precise for weights near 1."""
    roundings: Tensor
    """Priorities that differ by no more than this count as equal."""


class _Route(NamedTuple):
    """The choices that are sent to experts."""

    slots: Tensor
    """This rank's choices that are sent, sorted by expert. Choice c of token t is number ``t * top + c``."""
    counts: Tensor
    """(ranks, experts) int64: the number of tokens that each rank sends to each expert."""


class Experts(nn.Module):
    """A mixture of two-layer feed-forward experts.

    The balance belongs to the whole batch and is the same on all ranks. To add it once to a loss that is a mean over
    terms, each rank adds it to its total *once for each term*: ``total + 0.01 * mixed.balance * len(targets)``, where
    ``len`` counts the terms.

    Args:
        width: Width of a token.
        hidden: Width of each expert's inner layer.
        experts: Number of experts.
        top: Number of experts for each token.
        capacity: The most tokens that an expert takes, as a multiple of its share if all experts got equally many; None
            for no limit. The choices with the largest weights are kept. Equal choices at the limit are all dropped.
        normalized: True to scale the weights of a token's experts so that they add up to 1; not with ``top=1``.
        activation: The function between the two layers of an expert.

    Raises:
        ConfigurationError: If ``top`` or ``capacity`` is out of range, or ``normalized`` is used with ``top=1``.
    """

    held: range
    """The experts of this rank; all experts if they are not divided."""
    _divided = Shared[tuple[ProcessGroup, tuple[range, ...]]]()

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top: int = 2,
        capacity: float | None = None,
        normalized: bool = True,
        activation: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        if not 1 <= top <= experts:
            raise ConfigurationError(
                f"each token goes to {top} of {experts} experts; it must be 1 to {experts}"
            )
        if capacity is not None and not 0 < capacity < math.inf:
            raise ConfigurationError(f"the capacity of an expert is {capacity}; it must be above 0, or None")
        if top == 1 and normalized:
            raise ConfigurationError(
                "with top=1 the weights that are scaled to add up to 1 are all 1, and the router learns nothing from "
                "what its experts say: give normalized=False"
            )
        self.width, self.experts, self.top = width, experts, top
        self.capacity, self.normalized, self.activation = capacity, normalized, activation
        self.held = range(experts)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.up_bias = nn.Parameter(torch.empty(experts, hidden))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_bias = nn.Parameter(torch.empty(experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes each expert as two ``nn.Linear``."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Mixed:
        """Sends each token to its experts and returns the weighted sum of their outputs.

        All ranks that compute the batch must call this together.

        Args:
            x: (samples, ..., width).
            mask: (samples, ...) bool, False where a token is padding. Padding goes to no expert, does not count, and
                its output is 0. Without a mask, the result depends on the length to which samples are padded.

        Raises:
            ConfigurationError: If ``x`` or the mask has another shape or type.
        """
        self._check(x, mask)
        rows = without_placeholder(x)
        tokens = rows.reshape(-1, self.width)
        if mask is None:
            output, balance, dropped = self._mixed(tokens)
        else:
            places = without_placeholder(mask).reshape(-1).nonzero().squeeze(1)
            real, balance, dropped = self._mixed(tokens[places])
            output = torch.zeros_like(tokens).index_copy(0, places, real)
        output = output.view(rows.shape)
        # A placeholder has no rows, but its backward must pass through here too: other ranks wait for it.
        return Mixed(output if rows is x else torch.zeros_like(x) + output.sum(), balance, dropped)

    def expert(self, tokens: Tensor, index: int) -> Tensor:
        """Applies one of this rank's experts to (tokens, width); may be no tokens. ``index`` counts within ``held``."""
        inner = self.activation(F.linear(tokens, self.up[index], self.up_bias[index]))
        return F.linear(inner, self.down[index], self.down_bias[index])

    def divide(self, pieces: Sequence[range], group: ProcessGroup) -> None:
        """Sets which experts each rank of ``group`` holds. The caller must cut the parameters in :data:`STACKED` along
        dimension 0."""
        self._divided = Shared((group, tuple(pieces)))
        self.held = pieces[group.rank()]

    def extra_repr(self) -> str:
        held = "" if len(self.held) == self.experts else f", held={self.held.start}:{self.held.stop}"
        return f"{self.width}, experts={self.experts}, top={self.top}, capacity={self.capacity}{held}"

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        if x.dim() < 2 or x.shape[-1] != self.width:
            raise ConfigurationError(f"{self} got {tuple(x.shape)}; it takes (samples, ..., {self.width})")
        if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != torch.bool):
            raise ConfigurationError(
                f"{self} got a mask {tuple(mask.shape)} of {mask.dtype} for tokens {tuple(x.shape[:-1])}; it must be "
                "of that shape, and bool: True where there is a token"
            )
        if len(self.held) < self.experts:
            self._divided.value_for(self)

    def _mixed(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group = self._divided.value[0] if self._divided.value else data_group()
        scores = self.router(tokens)
        probabilities = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        choice = self._choice(scores, probabilities)
        weights, experts = choice.weights, choice.experts
        chosen = self._counts(experts, group)
        route = self._route(choice, chosen, group)
        sent = self._through(tokens[route.slots // self.top], route.counts, group)
        weighed = sent * weights.reshape(-1, 1)[route.slots].to(sent.dtype)
        output = sent.new_zeros(len(tokens) * self.top, self.width).index_copy(0, route.slots, weighed)
        total = chosen.sum().clamp(min=1)
        return (
            output.view(len(tokens), self.top, self.width).sum(1),
            self._balance(probabilities, chosen.sum(0).double() / total, total.double() / self.top, group),
            1 - route.counts.sum() / total,
        )

    def _choice(self, scores: Tensor, probabilities: Tensor) -> _Choice:
        """Chooses the experts of the largest probabilities; among equal ones, those with the lowest numbers."""
        known = scores.detach().to(probabilities.dtype)
        largest = known.abs().amax(-1, keepdim=True) if len(known) else known[:, :1]
        roundings = torch.finfo(scores.dtype).eps ** 0.75 * largest.clamp(min=1.0)
        steps = ((known - known.amax(-1, keepdim=True)) / roundings).round() if len(known) else known
        experts = steps.sort(dim=-1, descending=True, stable=True).indices[:, : self.top]
        weights = probabilities.gather(-1, experts)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        compared = known.gather(-1, experts) if self.normalized else known
        own = torch.arange(self.top, device=known.device).expand_as(experts) if self.normalized else experts
        others = [compared.scatter(-1, each, -math.inf).logsumexp(-1) for each in own.split(1, -1)]
        priorities = known.gather(-1, experts) - torch.stack(others, -1)
        return _Choice(weights, experts, priorities, roundings.expand_as(experts))

    def _counts(self, experts: Tensor, group: ProcessGroup | None) -> Tensor:
        """Returns (ranks, experts): how often each rank's tokens chose each expert."""
        own = torch.bincount(experts.reshape(-1), minlength=self.experts)[None]
        return own if group is None else gathered(own, 0, [1] * group.size(), group)

    def _balance(
        self, probabilities: Tensor, used: Tensor, tokens: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        """Returns experts * Σ (fraction of the choices) * (mean probability): Switch Transformers, equation 4."""
        mean = all_reduce(probabilities.sum(0), group) / tokens
        return self.experts * (used.to(mean.dtype) * mean).sum()

    def _route(self, choice: _Choice, chosen: Tensor, group: ProcessGroup | None) -> _Route:
        experts = choice.experts.reshape(-1)
        if self.capacity is None:
            return _Route(experts.argsort(stable=True), chosen)
        fits, counts = self._fitting(choice, chosen, group)
        slots = fits.nonzero().squeeze(1)
        return _Route(slots[experts[slots].argsort(stable=True)], counts)

    def _fitting(self, choice: _Choice, chosen: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Returns which of this rank's choices fit into the capacity, compared with all ranks' choices; and the number
        of fitting choices for each (rank, expert)."""
        assert self.capacity is not None
        lengths = chosen.sum(1).tolist()
        room = math.ceil(self.capacity * sum(lengths) / self.experts)
        asked_for = torch.stack([choice.priorities.reshape(-1), choice.roundings.reshape(-1)], -1)
        experts = choice.experts.reshape(-1)
        if group is not None:
            asked_for, experts = (gathered(each, 0, lengths, group) for each in (asked_for, experts))
        fits = torch.ones_like(experts, dtype=torch.bool)
        for expert in range(self.experts):
            asking = experts == expert
            priorities, roundings = asked_for[asking].unbind(-1)
            if len(priorities) > room:
                # Priorities of equal tokens may differ by rounding, which depends on the device that computes them.
                fits[asking] = priorities > priorities.sort(descending=True).values[room] + roundings.max()
        of_ranks = list(zip(torch.split(fits, lengths), torch.split(experts, lengths), strict=True))
        counts = [torch.bincount(asked[fit], minlength=self.experts) for fit, asked in of_ranks]
        return of_ranks[group.rank() if group else 0][0], torch.stack(counts)

    def _through(self, tokens: Tensor, counts: Tensor, group: ProcessGroup | None) -> Tensor:
        """Applies the experts to this rank's tokens, which must be sorted by expert; keeps their order."""
        table = counts.tolist()  # the host has to know how long messages are
        own = table[group.rank() if group else 0]
        if self._divided.value is None:
            return self._computed(tokens, own)
        _, pieces = self._divided.value
        splits = [sum(own[expert] for expert in piece) for piece in pieces]
        received = [sum(row[expert] for expert in self.held) for row in table]
        came = all_to_all(tokens, group, splits, received=received)
        of_held = counts[:, self.held.start : self.held.stop]
        labels = torch.arange(len(self.held), device=tokens.device).repeat(len(table))
        order = labels.repeat_interleave(of_held.reshape(-1)).argsort(stable=True)
        made = self._computed(came[order], of_held.sum(0).tolist())
        return all_to_all(torch.empty_like(made).index_copy(0, order, made), group, received, received=splits)

    def _computed(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Applies every expert of this rank, also one without tokens, so that its gradient is zero and not None."""
        pieces = enumerate(torch.split(tokens, counts))
        return torch.cat([self.expert(piece, index) for index, piece in pieces])
