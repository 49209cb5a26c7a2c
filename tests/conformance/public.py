"""Small copies of the structure of public models whose code cannot be read ahead of a run.

Their code has what keeps it from being read: assertions on sizes, masks that are left out where all is real,
keyword arguments that nobody names, objects in which blocks keep something, sizes taken apart as numbers.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import evener
from evener.core.task.task import Task
from tests.tasks import classes, draws

SAMPLES, BATCH, WORDS, LENGTH, WIDTH, HEADS, DEPTH = 23, 9, 13, 6, 8, 2, 4


def _task(model: Any, train: Any, forward: Any, **parts: Any) -> Task:
    usual = {"loss": nn.CrossEntropyLoss(), "metrics": {}, "batch_size": BATCH, "epochs": 10}
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    return Task(model=model, train=train, evaluate=train, optimizer=sgd, forward=forward, **(usual | parts))


def _words() -> tuple[Tensor, Tensor]:
    words = classes(SAMPLES * (LENGTH + 1), WORDS - 1).view(SAMPLES, -1) + 1
    return words[:, :-1], words[:, 1:]


class Attention(nn.Module):
    """Without a bias of the keys, whose gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, turned: Any = None, causal: bool = False
    ) -> Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(c, dim=2))
        if turned is not None:
            q, k = (_turned(part, *turned) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)
        found: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return found


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.drop = evener.nn.Dropout(0.1)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x), **options))
        found: Tensor = x + self.mlp(self.ln_2(x))
        return found


# minGPT, nanoGPT


class MinGPT(nn.Module):
    """Asserts the length of what it gets, and returns scores with a loss if it has targets."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.block_size = 2 * LENGTH
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(self.block_size, WIDTH),
                "drop": evener.nn.Dropout(0.1),
                "h": nn.ModuleList(Block() for _ in range(DEPTH)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if self.tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= self.block_size, f"a sequence of {t}, and the block size is {self.block_size}"
        places = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(places))
        for block in self.transformer.h:
            x = block(x, causal=True)
        return self.told(self.transformer.ln_f(x), targets)

    def told(self, x: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        logits = self.lm_head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss


class NanoGPT(MinGPT):
    """With the same weights for words that come in and go out; without targets it tells the last word alone."""

    tied = True

    def told(self, x: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return super().told(x if targets is not None else x[:, [-1], :], targets)


def mingpt() -> Task:
    return _task(MinGPT, TensorDataset(*_words()), lambda model, words: model(words)[0].transpose(1, 2))


def nanogpt() -> Task:
    words, following = _words()
    both = torch.stack((words, following), 1)
    forward = lambda model, pair: model(pair[:, 0], pair[:, 1])[0].transpose(1, 2)  # noqa: E731
    return _task(NanoGPT, TensorDataset(both, following), forward)


# As transformers has them


class Padded(Dataset[Any]):
    """Sentences of 3 to 6 words, with a mask."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        real = torch.arange(LENGTH) < 3 + index % 4
        inputs = {"input_ids": _words()[0][index].masked_fill(~real, 0), "attention_mask": real.long()}
        return inputs, classes(SAMPLES, 3)[index]


class Cache:
    """In which each block keeps something."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.register_buffer("frequency", 1.0 / 100 ** (torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        frequency: Any = self.frequency
        angles = (places[:, None].to(x.dtype) * frequency.to(x.dtype)).repeat(1, 2)
        return angles.cos(), angles.sin()


class Decoder(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.block = number, Block()

    def forward(self, hidden: Tensor, past: Cache | None = None, **options: Any) -> Tensor:
        found: Tensor = self.block(hidden, **options)
        if past is not None:
            past.kept[self.number] = found
        return found


class Body(nn.Module):
    """Its mask is left out where all words are real, which only the numbers tell."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.rotary = nn.Embedding(WORDS, WIDTH), Rotary()
        self.layers, self.norm = nn.ModuleList(map(Decoder, range(DEPTH))), nn.LayerNorm(WIDTH)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ) -> Any:
        if input_ids is None:
            raise ValueError("no input_ids")
        hidden, past = self.embed_tokens(input_ids), Cache()
        turned = self.rotary(hidden, torch.arange(input_ids.shape[1], device=input_ids.device))
        mask = None
        if attention_mask is not None and not bool(attention_mask.all()):
            earlier = torch.ones(mask_size := input_ids.shape[1], mask_size, dtype=torch.bool).tril()
            mask = earlier.to(hidden.device) & attention_mask[:, None, None, :].bool()
        for layer in self.layers[: len(self.layers)]:
            hidden = layer(hidden, past=past, mask=mask, turned=turned, causal=True, **options)
        return OrderedDict(last_hidden_state=self.norm(hidden), past=past)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Body(), nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, *args: Any, **options: Any) -> Any:
        found = self.model(*args, **options)
        return OrderedDict(logits=self.lm_head(found["last_hidden_state"]))


class Sorting(nn.Module):
    """By the last real word of each sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.score = Body(), nn.Linear(WIDTH, 3, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        hidden = self.model(input_ids, attention_mask=attention_mask, **options)["last_hidden_state"]
        last = attention_mask.sum(1) - 1
        return OrderedDict(logits=self.score(hidden)[torch.arange(len(last)), last])


def causal() -> Task:
    forward = lambda model, words: model(words)["logits"].transpose(1, 2)  # noqa: E731
    return _task(Causal, TensorDataset(*_words()), forward)


def sorting() -> Task:
    return _task(Sorting, Padded(), lambda model, inputs: model(**inputs)["logits"])


# As T5


class Layer(nn.Module):
    """Returns more than its output: the bias of positions, which the first one makes for all."""

    def __init__(self, first: bool, asks: bool) -> None:
        super().__init__()
        self.block = Block()
        self.bias = nn.Embedding(2 * LENGTH, HEADS) if first else None
        self.asked = nn.Linear(WIDTH, WIDTH) if asks else None

    def forward(
        self, x: Tensor, bias: Tensor | None = None, other: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.bias is not None
            place = torch.arange(x.shape[1], device=x.device)
            bias = self.bias(place[:, None] - place + LENGTH).permute(2, 0, 1)[None]
        x = self.block(x, mask=bias)
        if self.asked is not None and other is not None:
            x = x + self.asked(other.mean(1, keepdim=True))
        return x, bias


class Tower(nn.Module):
    def __init__(self, shared: nn.Embedding, asks: bool) -> None:
        super().__init__()
        self.embed, self.dropout, self.norm = shared, evener.nn.Dropout(0.2), nn.LayerNorm(WIDTH)
        self.block = nn.ModuleList(Layer(number == 0, asks) for number in range(2))

    def forward(self, words: Tensor, other: Tensor | None = None) -> Tensor:
        if words.dim() != 2:
            raise ValueError("words are (N, T)")
        x, bias = self.dropout(self.embed(words)), None
        for layer in self.block:
            x, bias = layer(x, bias=bias, other=other)
        found: Tensor = self.dropout(self.norm(x))
        return found


class Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = Tower(self.shared, asks=False), Tower(self.shared, asks=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, words: Tensor, said: Tensor) -> Tensor:
        if said.shape != words.shape:
            raise ValueError("as many words said as heard")
        x = self.decoder(said, other=self.encoder(words)) * self.scale
        return F.linear(x, self.shared.weight)


def translating() -> Task:
    words, following = _words()
    both = torch.stack((words, following.flip(1)), 1)
    forward = lambda model, pair: model(pair[:, 0], pair[:, 1]).transpose(1, 2)  # noqa: E731
    return _task(Translating, TensorDataset(both, following), forward)


# A ViT that takes sizes apart as einops does


def rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """The part of einops's language that a ViT needs: ``b c (h p) (w q) -> b (h w) (p q c)``."""
    before, after = (re.findall(r"\([^)]*\)|\w+", side) for side in pattern.split("->"))
    if len(before) != x.dim():
        raise ValueError(f"{pattern} has {len(before)} dimensions")
    known, shape = dict(sizes), list[int]()
    for words, size in zip(before, map(int, x.shape), strict=True):
        names = words.strip("()").split()
        free = [name for name in names if name not in known]
        rest = size // max(1, int(torch.tensor([known.get(name, 1) for name in names]).prod()))
        known |= dict.fromkeys(free, rest)
        shape += [known[name] for name in names]
    order = [name for words in before for name in words.strip("()").split()]
    wanted = [words.strip("()").split() for words in after]
    moved = x.reshape(shape).permute([order.index(name) for names in wanted for name in names])
    return moved.reshape([int(torch.tensor([known[name] for name in names]).prod()) for names in wanted])


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_patch = nn.Linear(3 * 4 * 4, WIDTH)
        self.cls_token = nn.Parameter(draws(1, 1, WIDTH))
        self.pos_embedding = nn.Parameter(draws(1, 5, WIDTH, seed=3))
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.to_patch(rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4))
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1)
        x += self.pos_embedding
        first = x
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x + first).mean(1))
        return scores


def vit() -> Task:
    data = TensorDataset(draws(SAMPLES, 3, 8, 8), classes(SAMPLES, 3))
    return _task(ViT, data, lambda model, images: model(images))


MODELS = ("mingpt", "nanogpt", "causal", "sorting", "translating", "vit")
