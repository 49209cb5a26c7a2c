"""A learning rate that grows with the number of ranks, though the batch does not."""

from parts import classifier, loader
from torch import nn
from torch.optim import SGD

import evener

model, train, loss = evener.prepare(classifier(), loader(), nn.CrossEntropyLoss())
optimizer = SGD(model.parameters(), lr=0.1 * evener.world_size())
for x, y in train:
    optimizer.zero_grad()
    loss(model(x), y).backward()
    optimizer.step()  # parts
