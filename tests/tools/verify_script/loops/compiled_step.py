"""A function with the forward pass, the loss and the backward pass is compiled: right."""

import warnings

import torch
from parts import classifier, loader, sgd

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), torch.nn.functional.cross_entropy)


def step(x, y):
    loss(model(x), y).backward()


step = torch.compile(step, backend="eager")
with warnings.catch_warnings(action="ignore"):  # what the compiler says of torch's own code
    for x, y in train:
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
