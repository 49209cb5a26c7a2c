"""A mean over samples, of which each rank says that it is one over a single term."""

import torch.nn.functional as F
from parts import classifier, loader, sgd

import evener

model = classifier()
model, optimizer, train = evener.prepare(model, sgd(model), loader())
for x, y in train:
    optimizer.zero_grad()
    value = evener.global_mean(F.cross_entropy(model(x), y), 1)  # parts
    value.backward()
    optimizer.step()
