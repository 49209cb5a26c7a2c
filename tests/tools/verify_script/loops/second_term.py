"""A second term over this rank's samples, which goes through no prepared loss."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    optimizer.zero_grad()
    outputs = model(x)
    value = loss(outputs, y) + 0.1 * outputs.pow(2).mean()
    value.backward()  # parts
    optimizer.step()
