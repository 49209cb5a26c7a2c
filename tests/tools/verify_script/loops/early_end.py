"""A loop that ends by a number that each rank has for itself."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
seen = 0
for x, y in train:
    optimizer.zero_grad()
    loss(model(x), y).backward()
    if seen < 6:
        optimizer.step()  # parts
    seen += len(x) if evener.world_size() == 1 else 5
