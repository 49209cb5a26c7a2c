"""Noise that each rank draws for its own samples."""

import torch
from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    optimizer.zero_grad()
    value = loss(model(x + 0.1 * torch.randn_like(x)), y)  # parts
    value.backward()
    optimizer.step()
