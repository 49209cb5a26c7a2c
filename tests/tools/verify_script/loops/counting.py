"""A loop that takes so many batches as there are, and fails if there are fewer."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
batches = iter(train)
for _ in range(len(train)):
    x, y = next(batches)
    optimizer.zero_grad()
    loss(model(x), y).backward()
    optimizer.step()
assert next(batches, None) is None
