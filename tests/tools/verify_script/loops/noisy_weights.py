"""Noise that is added to the weights, which each rank draws for itself."""

import torch
from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    optimizer.zero_grad()
    value = loss(model(x), y)  # parts
    value.backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
