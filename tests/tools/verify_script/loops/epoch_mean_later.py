"""An epoch longer than the runs, whose mean is a rank's own; later parts of the script never run."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(60), nn.CrossEntropyLoss())
total = count = 0
for _ in range(2):
    for x, y in train:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        total += value.item() * len(list(x))  # which is not read as a number of rows
        count += 1
    if evener.is_main():
        print(f"{count} batches: {total / len(train.dataset):.4f}")  # parts
