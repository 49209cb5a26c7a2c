"""The training is right, and the mean that is told of an epoch is a rank's own."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), nn.CrossEntropyLoss())
for epoch in range(2):
    total = 0.0
    for x, y in train:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        total += value.item() * len(x)  # parts
    if evener.is_main():
        print(f"epoch {epoch}: {total / len(train.dataset):.4f}")
