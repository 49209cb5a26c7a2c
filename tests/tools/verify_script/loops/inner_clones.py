"""An inner step for each sample, from clones of the weights (MAML): ranks make as many as they have samples."""

import torch
from parts import classifier, loader, sgd
from torch.func import functional_call
from torch.nn import functional

import evener

model = classifier()
model, optimizer, train = evener.prepare(model, sgd(model), loader(24))
for x, y in train:
    optimizer.zero_grad()
    losses = []
    for each, label in zip(x[:, None], y[:, None], strict=True):
        weights = {name: p.clone() for name, p in model.named_parameters()}
        inner = functional.cross_entropy(functional_call(model, weights, each), label)
        gradients = torch.autograd.grad(inner, weights.values(), create_graph=True)
        weights = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        losses.append(functional.cross_entropy(functional_call(model, weights, each), label))
    evener.global_mean(torch.stack(losses)).backward()
    optimizer.step()
