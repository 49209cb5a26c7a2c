"""A hook that clamps the gradient of each parameter: right."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
for x, y in train:
    optimizer.zero_grad()
    loss(model(x), y).backward()
    optimizer.step()
