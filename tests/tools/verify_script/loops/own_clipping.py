"""Gradients that are clipped by a number of this rank's samples."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    optimizer.zero_grad()
    loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01 * len(x))
    optimizer.step()  # parts
