"""Two models and two optimizers in turn, with noise that is drawn for the whole batch: right."""

import torch
from parts import classifier, loader
from torch import nn

import evener

torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
critic = nn.Sequential(classifier(), nn.Tanh(), nn.Linear(3, 1)).double()
first = torch.optim.Adam(generator.parameters(), lr=0.02)
second = torch.optim.Adam(critic.parameters(), lr=0.02)
generator, critic, first, second, train, loss = evener.prepare(
    generator, critic, first, second, loader(), nn.BCEWithLogitsLoss()
)
for x, _ in train:
    made = generator(evener.draw(torch.randn, 3, dtype=torch.float64))
    second.zero_grad()
    real, false = critic(x), critic(made.detach())
    total = loss(real, torch.ones_like(real)) + loss(false, torch.zeros_like(false))
    total.backward()
    second.step()
    first.zero_grad()
    judged = critic(made)
    loss(judged, torch.ones_like(judged)).backward()
    first.step()
