"""Two batches a step, of which the first leaves its gradients to the second: right."""

import torch
from parts import classifier, loader, sgd

import evener

model = classifier()
model, optimizer, train, loss = evener.prepare(model, sgd(model), loader(), torch.nn.functional.cross_entropy)
for number, (x, y) in enumerate(train):
    if number % 2 == 0:
        with evener.no_sync():
            (loss(model(x), y) / 2).backward()
    else:
        (loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
