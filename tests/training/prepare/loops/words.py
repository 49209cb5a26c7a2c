"""A small GPT, as minGPT trains it: a model that computes its loss, and a loop that draws batches for ever."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Gpt(nn.Module):
    def __init__(self, words=11, length=6, width=8):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, bias=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x, targets=None):
        places = torch.arange(x.shape[1], device=x.device)
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        logits = self.head(self.block(self.words(x) + self.places(places), later))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)
        return logits, loss


class Trainer:
    def __init__(self, model, train_dataset):
        self.model, self.train_dataset = model, train_dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))

    def run(self, max_iters, told):
        model = self.model
        train_loader = DataLoader(
            self.train_dataset,
            sampler=RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10)),
            batch_size=7,
            num_workers=0,
        )
        model.train()
        iter_num = 0
        data_iter = iter(train_loader)
        while True:
            try:
                x, y = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                x, y = next(data_iter)
            logits, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            self.optimizer.step()
            told.append(self.loss.item())
            iter_num += 1
            if iter_num >= max_iters:
                break


def main():
    drawn, told = torch.Generator().manual_seed(1), []
    text = torch.randint(11, (40, 7), generator=drawn)
    targets = text[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=drawn) < 0.3] = -1
    trainer = Trainer(Gpt().double(), TensorDataset(text[:, :-1].contiguous(), targets))
    trainer.run(9, told)
    return trainer.model.state_dict(), told
