"""A layer of experts, of which each token goes to a few, and which may be divided over ranks.

A router gives every token a probability for each expert; the ``top`` largest choose its experts and weigh what they say
(Shazeer et al., "Outrageously large neural networks", 2017; Fedus, Zoph and Shazeer, "Switch Transformers", 2022)::

    y = Σ p_e expert_e(x)        over the experts e that x has chosen

Where the experts are divided, each rank routes its own samples' tokens, sends them to the ranks that hold the chosen
experts, and gets them back (:func:`evener.nn.all_to_all`, whose adjoint brings the gradients home)::

    rank 0   tokens ─ route ─┐            ┌─ experts 0 1 ─┐            ┌─ weigh and add
                             ├ all_to_all ┤               ├ all_to_all ┤
    rank 1   tokens ─ route ─┘            └─ experts 2 3 ─┘            └─ weigh and add

An expert sees the tokens of all ranks, so its gradient is whole where it is. What depends on the whole batch, how busy
each expert is and which tokens find no room, is computed of the tokens of all ranks, divided or not: that is what makes
the layer the same on any division. No choice depends on the order of tokens, nor on rounding where two are alike:
scores that lie no further apart than rounding may bring them count as equal.
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
"""The parameters that hold the experts side by side, along dimension 0."""


class Mixed(NamedTuple):
    """What :class:`Experts` returns."""

    output: Tensor
    """As the input: (samples, ..., width)."""
    balance: Tensor
    """How evenly the router uses the experts, of all ranks' tokens, 0-d: 1 if evenly, up to the number of experts if
    all tokens go to one. Added to the loss, it keeps experts from lying idle (see :class:`Experts`)."""
    dropped: Tensor
    """Which part of all ranks' choices found no room, 0-d, without gradient."""


class _Choice(NamedTuple):
    """Which experts the tokens of this rank have chosen: (tokens, top) each."""

    weights: Tensor
    experts: Tensor
    priorities: Tensor
    """In the order of the weights, and as far apart for weights near 1 as for others: the score of the expert against
    the others' together, ``log(weight / (1 - weight))``."""
    roundings: Tensor
    """Priorities that lie no further apart may be equal."""


class _Route(NamedTuple):
    """Who computes what."""

    slots: Tensor
    """Of this rank's choices, counted along tokens and then along each token's, those that are sent, by expert."""
    counts: Tensor
    """(ranks, experts) int64: how many tokens each rank sends to each expert."""


class Experts(nn.Module):
    """A mixture of two-layer feed-forward experts.

    The balance is a number of the whole batch, the same on all ranks. A loss that is a mean over terms has it once if
    each rank adds it to its total *once a term*: ``total + 0.01 * mixed.balance * len(targets)``, where ``len`` counts
    the terms.

    Args:
        width: Of a token.
        hidden: Of each expert's inner layer.
        experts: How many there are.
        top: How many each token goes to.
        capacity: The most tokens that an expert takes, as a multiple of what it would get if all got as many; None for
            no limit. The choices of the largest weights find room; of equal ones at the limit, none.
        normalized: Whether the weights of a token's experts are scaled to add up to 1; not with ``top=1``.
        activation: Between the two layers of an expert.

    Raises:
        ConfigurationError: For numbers that cannot be.
    """

    held: range
    """The experts of this rank; all of them unless they are divided."""
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
        """Each expert as two ``nn.Linear``."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Mixed:
        """Each token's experts, weighed.

        Args:
            x: (samples, ..., width).
            mask: (samples, ...) bool, False where a token is padding: it goes to no expert, counts nowhere, and its
                output is 0. Padding that is not masked makes the layer depend on how long samples are padded.

        Raises:
            ConfigurationError: If ``x`` or the mask is of another shape.
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
        # Of a placeholder there are no rows, and backward has to come by here all the same: other ranks wait.
        return Mixed(output if rows is x else torch.zeros_like(x) + output.sum(), balance, dropped)

    def expert(self, tokens: Tensor, index: int) -> Tensor:
        """What one of this rank's experts makes of (tokens, width), of which there may be none."""
        inner = self.activation(F.linear(tokens, self.up[index], self.up_bias[index]))
        return F.linear(inner, self.down[index], self.down_bias[index])

    def divide(self, pieces: Sequence[range], group: ProcessGroup) -> None:
        """Says that each rank of ``group`` holds its piece of the experts, along dimension 0 of :data:`STACKED`."""
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
            self._divided.of(self)

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
        """The experts of the largest probabilities, of equal ones the first."""
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
        """(ranks, experts): how often each rank's tokens chose each expert."""
        own = torch.bincount(experts.reshape(-1), minlength=self.experts)[None]
        return own if group is None else gathered(own, 0, [1] * group.size(), group)

    def _balance(
        self, probabilities: Tensor, used: Tensor, tokens: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        """Experts times the sum of (part of the choices) times (mean probability): Switch Transformers, equation 4."""
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
        """Which of this rank's choices find room among those of all ranks, and how many of each rank do."""
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
                # Those of equal tokens differ by rounding, which depends on who computes them.
                fits[asking] = priorities > priorities.sort(descending=True).values[room] + roundings.max()
        of_ranks = list(zip(torch.split(fits, lengths), torch.split(experts, lengths), strict=True))
        counts = [torch.bincount(asked[fit], minlength=self.experts) for fit, asked in of_ranks]
        return of_ranks[group.rank() if group else 0][0], torch.stack(counts)

    def _through(self, tokens: Tensor, counts: Tensor, group: ProcessGroup | None) -> Tensor:
        """What the experts make of this rank's tokens, which are sorted by expert; in the same order."""
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
        """Every expert of this rank, also one without tokens: its gradient is zero then, and not missing."""
        pieces = enumerate(torch.split(tokens, counts))
        return torch.cat([self.expert(piece, index) for index, piece in pieces])
