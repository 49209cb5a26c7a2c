"""Packed sequences: a sample is several documents in a row, so that little of a batch is padding.

Documents are packed into samples of at most ROOM tokens, which leaves samples of unequal numbers of tokens. A document
sees itself alone: attention stays within it, and its positions begin at 0. The loss is a mean over the tokens that
have a next one, so it does not depend on how documents are packed together, nor on which rank has which sample.
A sample costs as many tokens as it has, so a rank's share of a batch is a share of its tokens.

    python examples/packed_sequences.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import evener

IGNORED = -100
VOCABULARY = 12
ROOM = 48
WIDTH, HEADS = 32, 4

Sample = list[Tensor]
"""Documents, each of tokens (T,)."""


def documents(number: int = 900) -> list[Tensor]:
    """Sequences that count up or down from some token, of 3 to 24 tokens."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 25, (number,), generator=draw).tolist()
    starts = torch.randint(VOCABULARY, (number,), generator=draw).tolist()
    return [
        torch.arange(start, start + length) * (1 - 2 * (place % 2)) % VOCABULARY
        for place, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def packed(texts: list[Tensor], room: int = ROOM) -> list[Sample]:
    """Puts the documents, in their order, into samples of at most ``room`` tokens."""
    samples: list[Sample] = [[]]
    for text in texts:
        if sum(map(len, samples[-1])) + len(text) > room:
            samples.append([])
        samples[-1].append(text)
    return samples


def collate(samples: list[Sample]) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens, their positions and their documents' numbers, and the next tokens, all (N, T).

    Padding belongs to no document, -1. The last token of a document has no next one, IGNORED.
    """
    rows = [
        (
            torch.cat(texts),
            torch.cat([torch.arange(len(text)) for text in texts]),
            torch.cat([torch.full_like(text, number) for number, text in enumerate(texts)]),
            torch.cat([F.pad(text[1:], (0, 1), value=IGNORED) for text in texts]),
        )
        for texts in samples
    ]
    tokens, positions, document, following = (
        pad_sequence(list(column), batch_first=True, padding_value=filler)
        for column, filler in zip(zip(*rows, strict=True), (0, 0, -1, IGNORED), strict=True)
    )
    return {"tokens": tokens, "positions": positions, "document": document}, following


class Reader(nn.Module):
    """From packed tokens to scores (N, T, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(ROOM, WIDTH)
        self.parts = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, VOCABULARY)
        )

    def forward(self, tokens: Tensor, positions: Tensor, document: Tensor) -> Tensor:
        hidden = self.token(tokens) + self.position(positions)
        query, key, value = self.parts(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        same = document[:, :, None] == document[:, None, :]
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=same.tril()[:, None])
        scores: Tensor = self.out(hidden + self.mixed(seen.transpose(1, 2).flatten(2)))
        return scores


def summed(scores: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="sum")


def counted(following: Tensor) -> Tensor:
    """The number of tokens that have a next one."""
    return (following != IGNORED).sum()


def right(scores: Tensor, following: Tensor) -> evener.Sum:
    return evener.Sum((scores.argmax(-1) == following).sum(), counted(following))


def task() -> evener.Task:
    samples = packed(documents())
    return evener.Task(
        name="packed",
        model=Reader,
        loss=evener.loss(total=summed, count=counted),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        train=samples,
        evaluate=samples,
        metrics={"accuracy": right},
        collate=collate,
        cost=[sum(map(len, sample)) for sample in samples],
        batch_size=16,
        epochs=3,
    )


def padding(samples: list[Sample], longest: int) -> float:
    """The part of a batch that is padding if all samples are padded to ``longest``."""
    return 1 - sum(len(text) for sample in samples for text in sample) / (longest * len(samples))


if __name__ == "__main__":
    texts = documents()
    alone, together = padding([[text] for text in texts], 24), padding(packed(texts), ROOM)
    print(f"padding {alone:.2f} of a batch of single documents, {together:.2f} packed")
    trained = evener.fit(task, processes=2, balance="2,1")
    print(f"accuracy of the next token {trained.summary.metrics['accuracy']:.3f}")
