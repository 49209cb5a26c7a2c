"""An inner step on each rank's own samples, as of MAML, before the step of all ranks."""

import torch
import torch.nn.functional as F
from parts import classifier, loader, sgd
from torch import nn
from torch.func import functional_call

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for x, y in train:
    optimizer.zero_grad()
    weights = dict(model.named_parameters())
    inner = F.cross_entropy(functional_call(model, weights, x), y)
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)  # parts
    fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
    loss(functional_call(model, fast, x), y).backward()
    optimizer.step()
