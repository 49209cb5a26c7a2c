"""A learning rate that depends on how many of its own samples a rank has right."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    optimizer.zero_grad()
    outputs = model(x)
    loss(outputs, y).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.1 + (outputs.argmax(1) == y).double().mean().item()
    optimizer.step()  # parts
