"""A teacher in training mode that was not prepared."""

import torch
from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
teacher = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(24), nn.CrossEntropyLoss())
for x, _ in train:
    optimizer.zero_grad()
    with torch.no_grad():
        wanted = teacher(x).softmax(1)
    value = loss(model(x), wanted)  # parts
    value.backward()
    optimizer.step()
