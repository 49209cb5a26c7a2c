"""A plain PyTorch loop on all devices: `evener.prepare` takes its parts and gives them back.

    evener run --processes 2 examples/prepared_loop.py

By itself it trains on one device, and to the same weights.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener

torch.manual_seed(0)
inputs = torch.randn(200, 8)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=20, shuffle=True)
validation = DataLoader(data, batch_size=64)
loss = nn.CrossEntropyLoss()

model, optimizer, loader, validation, loss = evener.prepare(model, optimizer, loader, validation, loss)

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in validation:
            predictions, targets = evener.gather((model(x).argmax(1), y))
            right += (predictions == targets).sum().item()
    model.train()
    evener.print(
        f"epoch {epoch}: loss {value.item():.3f}, accuracy {right / len(data):.3f} on {evener.world_size()} ranks"
    )
