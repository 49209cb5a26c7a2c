"""A loss that compares each sample with all others of the batch, of which a rank has some."""

import torch
import torch.nn.functional as F
from parts import classifier, loader, sgd

import evener

model = classifier()
model, optimizer, train = evener.prepare(model, sgd(model), loader())
for x, _ in train:
    optimizer.zero_grad()
    first, second = model(x), model(x * 1.1)
    own = F.cross_entropy(first @ second.T, torch.arange(len(x)))
    value = evener.global_mean(own)  # parts
    value.backward()
    optimizer.step()
