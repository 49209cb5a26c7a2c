"""An inner step for each sample, whose gradient torch.func computes (MAML)."""

import torch
from parts import classifier, loader, sgd
from torch.func import functional_call, grad
from torch.nn import functional

import evener


def inner(weights, x, y):
    return functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])


model = classifier()
model, optimizer, train = evener.prepare(model, sgd(model), loader(24))
for x, y in train:
    optimizer.zero_grad()
    weights = dict(model.named_parameters())
    losses = []
    for each, label in zip(x, y, strict=True):
        found = grad(inner)(weights, each, label)
        losses.append(inner({name: p - 0.1 * found[name] for name, p in weights.items()}, each, label))
    evener.global_mean(torch.stack(losses)).backward()
    optimizer.step()
