"""One rank fails, the other waits for it."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    optimizer.zero_grad()
    if evener.world_size() > 1 and len(x) == 2:
        raise ValueError("I want more samples")  # parts
    loss(model(x), y).backward()
    optimizer.step()
