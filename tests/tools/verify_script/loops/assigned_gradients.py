"""Gradients that torch.autograd.grad gives, and that the loop assigns: right."""

import torch
from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss(model(x), y), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
