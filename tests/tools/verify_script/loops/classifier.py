"""Clipping, a scheduler, a validation whose rows are gathered, an argument, and what is told of an epoch: right."""

import argparse
import sys
import time

import torch
from parts import classifier, loader
from torch import nn

import evener


def main(epochs: int) -> None:
    began = time.time()
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    train, validation, loss = loader(), loader(15, seed=2), nn.CrossEntropyLoss()
    model, optimizer, scheduler, train, validation, loss = evener.prepare(
        model, optimizer, scheduler, train, validation, loss, balance="auto"
    )
    for epoch in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
        right = 0
        with torch.no_grad():
            for x, y in validation:
                found, wanted = evener.gather((model(x).argmax(1), y))
                right += int((found == wanted).sum())
        told = f"epoch {epoch}: loss {value.item():.4f}, {right} of 15 right on {evener.world_size()} ranks"
        evener.print(f"{told} after {time.time() - began:.3f} s")
    evener.save("classifier.pt", model=model, optimizer=optimizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    main(parser.parse_args().epochs)
    sys.exit()
