"""A loop that does not do the same twice."""

import os

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model[0].weight.data.mul_(1 + int.from_bytes(os.urandom(4), "little") / 2**32)
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    optimizer.zero_grad()
    value = loss(model(x), y)  # parts
    value.backward()
    optimizer.step()
