"""A model that a strategy divides: its name, and options behind it."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener

torch.manual_seed(0)
inputs = torch.randn(80, 8, dtype=torch.float64)
loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
settings = {"strategy": sys.argv[1], "strategy_option": tuple(sys.argv[2:])}
model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, nn.CrossEntropyLoss(), **settings)
for x, y in loader:
    optimizer.zero_grad()
    loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
