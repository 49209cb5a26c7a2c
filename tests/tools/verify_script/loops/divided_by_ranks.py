"""The loss over the number of ranks, as gradients that are summed elsewhere want it."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    optimizer.zero_grad()
    (loss(model(x), y) / evener.world_size()).backward()  # parts
    optimizer.step()
