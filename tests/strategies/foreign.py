"""Small copies of blocks of public models, whose code says sizes and asks for them: minGPT, GPT-2, BERT and Llama."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.core.task.task import Task
from tests.tasks import classes

SAMPLES, WORDS, LENGTH, WIDTH, HEADS, HIDDEN = 20, 13, 6, 12, 3, 16


class MinGPTAttention(nn.Module):
    """Asks its input for all sizes, and splits by a number; drops weights of attention."""

    def __init__(self, drop: Callable[[], nn.Module] = lambda: evener.nn.Dropout(0.2)) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = drop(), evener.nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH))[None, None], persistent=False)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        bias: Any = self.bias
        q, k, v = (
            part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(bias[:, :, :t, :t] == 0, float("-inf")).softmax(-1)
        y = self.attn_dropout(scores) @ v
        found: Tensor = self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))
        return found


class MinGPTBlock(nn.Module):
    """The feed-forward part is a dictionary, called by a function that is an attribute."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), MinGPTAttention(**options), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, HIDDEN), "c_proj": nn.Linear(HIDDEN, WIDTH)})
        m = self.mlp
        self.mlpf = lambda x: m["c_proj"](F.gelu(m["c_fc"](x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        found: Tensor = x + self.mlpf(self.ln_2(x))
        return found


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.2))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class GPT2Block(nn.Module):
    """Gives the weights of attention, too; and what is not a plain block is looked for in the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), GPT2Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(HIDDEN, WIDTH), "c_proj": Conv1D(WIDTH, HIDDEN)})

    def forward(self, x: Tensor, *, past: Any = None) -> Tensor:
        assert x.size(1) <= LENGTH
        y, _ = self.attn(self.ln_1(x), past=past)
        x = x + y
        found: Tensor = x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return found


class GPT2Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split_size, self.head_dim = WIDTH, WIDTH // HEADS
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: Tensor, past: Any = None) -> tuple[Tensor, Tensor]:
        q, k, v = (
            part.view(*part.shape[:-1], -1, self.head_dim).transpose(1, 2)
            for part in self.c_attn(x).split(self.split_size, dim=2)
        )
        weights = (q @ k.transpose(2, 3)).softmax(-1)
        y = (weights @ v).transpose(1, 2)
        return self.c_proj(y.reshape(*x.shape[:-1], -1)), weights


class Named(nn.Module):
    """Holds others, and calls them as its function does."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.given = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.given(self, *args, **kwargs)


class BertSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, WIDTH // HEADS
        self.all_head_size = WIDTH
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = evener.nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = self.dropout((q @ k.transpose(-1, -2) / math.sqrt(self.attention_head_size)).softmax(-1)) @ v
        return y.transpose(1, 2).reshape(*x.size()[:-1], self.all_head_size)


def bert_block() -> nn.Module:
    """A layer that begins a region and the one that ends it stand in modules of their own."""
    out = lambda width: Named(  # noqa: E731
        lambda m, y, x: m.LayerNorm(m.drop(m.dense(y)) + x),
        dense=nn.Linear(width, WIDTH),
        LayerNorm=nn.LayerNorm(WIDTH),
        drop=evener.nn.Dropout(0.1),
    )
    attention = Named(lambda m, x: m.output(m.self_(x), x), self_=BertSelfAttention(), output=out(WIDTH))
    intermediate = Named(lambda m, x: F.gelu(m.dense(x)), dense=nn.Linear(WIDTH, HIDDEN))

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.attention(x)
        found: Tensor = m.output(m.intermediate(x), x)
        return found

    return Named(forward, attention=attention, intermediate=intermediate, output=out(HIDDEN))


class LlamaAttention(nn.Module):
    """Two queries share a key; queries have a norm with a weight that all heads share."""

    def __init__(self, heads: int = 4, keys: int = 2, width: int = 4) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = width, heads // keys
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, heads * width), nn.Linear(heads * width, WIDTH))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, keys * width, bias=False) for _ in range(2))
        self.q_norm = nn.RMSNorm(width)

    def forward(self, x: Tensor, turned: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.k_proj, self.v_proj))
        q, k = (part * turned[0] + part.roll(2, -1) * turned[1] for part in (q, k))
        k, v = (part.repeat_interleave(self.num_key_value_groups, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1)), None


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.norm = LlamaAttention(), nn.RMSNorm(WIDTH)
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device).to(x.dtype)[:, None] / 9
        x = x + self.self_attn(self.norm(x), turned=(angles.cos(), angles.sin()))[0]
        found: Tensor = x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Talking(MinGPTAttention):
    """Its heads look at each other, so that they cannot be apart."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
        mixed = torch.einsum("nihd,njhd->nhij", q, k).softmax(1)
        found: Tensor = self.c_proj(torch.einsum("nhij,njhd->nihd", mixed, v).flatten(2))
        return found


class Normed(MinGPTBlock):
    """Between layers of fitting widths all features are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.inner = Talking(), nn.LayerNorm(HIDDEN)
        self.mlpf = lambda x: self.mlp["c_proj"](self.inner(self.mlp["c_fc"](x)))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.head = nn.ModuleList(block() for _ in range(2)), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        _, t = words.size()
        if t > LENGTH:
            raise ValueError(f"a sequence of {t}")
        x = self.embed(words) + self.place(torch.arange(t, device=words.device))
        for block in self.h:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores.transpose(1, 2)


def task_of(block: Callable[[], nn.Module]) -> Task:
    words = classes(SAMPLES * (LENGTH + 1), WORDS).view(SAMPLES, -1)
    data = TensorDataset(words[:, :-1], words[:, 1:])
    return Task(
        model=lambda: Model(block),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=data,
        evaluate=data,
        batch_size=8,
        epochs=9,
    )


def mingpt() -> Task:
    return task_of(MinGPTBlock)


def gpt2() -> Task:
    return task_of(GPT2Block)


def bert() -> Task:
    return task_of(bert_block)


def llama() -> Task:
    return task_of(LlamaBlock)


def whole() -> Task:
    return task_of(Normed)


def dropping() -> Task:
    """By the common generator, between divided layers and elsewhere."""
    return task_of(lambda: MinGPTBlock(drop=lambda: nn.Dropout(0.3)))


class InTraining(MinGPTAttention):
    """Brings heads together in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        scores = q @ k.transpose(-2, -1)
        if self.training:
            scores = scores - scores.mean(1, keepdim=True)
        y = scores.softmax(-1) @ v
        found: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return found


class InTrainingBlock(MinGPTBlock):
    def __init__(self) -> None:
        super().__init__()
        self.attn = InTraining()


def in_training() -> Task:
    return task_of(InTrainingBlock)


class Penalised(nn.Module):
    """Keeps the features between its layers, of which the loss has a term."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.up(self.embed(words)))
        return self.down(hidden), hidden.square().mean()


def of_hidden(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    scores, term = outputs
    return (
        F.cross_entropy(scores.flatten(0, 1), targets.flatten() % WIDTH, reduction="sum")
        + term * targets.numel()
    )


def penalised() -> Task:
    loss = evener.loss(total=of_hidden, count=torch.numel)
    return dataclasses.replace(task_of(nn.Identity), model=Penalised, loss=loss, evaluate=None)
