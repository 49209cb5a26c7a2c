"""The sum of all ranks over the number of this rank's samples."""

from parts import classifier, loader, sgd
from torch import nn

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(
    model, sgd(model), loader(), nn.CrossEntropyLoss(reduction="sum")
)
for x, y in train:
    optimizer.zero_grad()
    (loss(model(x), y) / len(x)).backward()  # parts
    optimizer.step()
