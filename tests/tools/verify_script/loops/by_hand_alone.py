"""Updates by hand, of each rank's own samples."""

import torch
import torch.nn.functional as F
from parts import classifier, loader

import evener

model = classifier()
model, train = evener.prepare(model, loader())
for x, y in train:
    weights = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), weights)  # parts
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 0.3 * gradient
