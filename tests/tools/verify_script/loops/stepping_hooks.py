"""Optimizers of one parameter each, which step within backward."""

import torch
from parts import classifier, loader
from torch import nn

import evener


def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


model = classifier()
optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}
for each in optimizers:
    each.register_post_accumulate_grad_hook(step)
model, train, loss = evener.prepare(model, loader(24), nn.CrossEntropyLoss())
for x, y in train:
    loss(model(x), y).backward()
