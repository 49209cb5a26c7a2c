"""Plain PyTorch, which nobody divides."""

from parts import classifier, loader, sgd
from torch import nn

model = classifier()
optimizer, loss = sgd(model), nn.CrossEntropyLoss()
for x, y in loader():
    optimizer.zero_grad()
    loss(model(x), y).backward()
    optimizer.step()
