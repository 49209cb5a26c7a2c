"""A small GPT, as nanoGPT trains it: batches cut from one long text by a function, without a DataLoader."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BLOCK, BATCH, WORDS = 6, 7, 11
text = {
    split: torch.randint(WORDS, (60,), generator=torch.Generator().manual_seed(1))
    for split in ("train", "val")
}


class Gpt(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(BLOCK, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, bias=False)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, x, targets=None):
        places = torch.arange(x.shape[1], device=x.device)
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        logits = self.head(self.block(self.words(x) + self.places(places), later))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def get_batch(split):
    data = text[split]
    ix = torch.randint(len(data) - BLOCK, (BATCH,))
    x = torch.stack([data[i : i + BLOCK] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + BLOCK] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss(model, eval_iters=2):
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def main(gradient_accumulation_steps=2, max_iters=5):
    model = Gpt().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    told, iter_num = [], 0
    while iter_num < max_iters:
        if iter_num % 2 == 0:
            told.extend(estimate_loss(model).values())
        for _ in range(gradient_accumulation_steps):
            X, Y = get_batch("train")
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        told.append(loss.item() * gradient_accumulation_steps)
        iter_num += 1
    return model.state_dict(), told
