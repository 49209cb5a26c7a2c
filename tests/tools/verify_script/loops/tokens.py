"""A mean over the words that are not padding, by PyTorch's own loss: right."""

import torch
from parts import sentences, sgd, speaker
from torch import nn
from torch.utils.data import DataLoader

import evener

model = speaker()
optimizer = sgd(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
data = DataLoader(sentences(), batch_size=4, shuffle=True)
model, optimizer, scheduler, data, loss = evener.prepare(
    model, optimizer, scheduler, data, nn.CrossEntropyLoss()
)
for words, targets in data:
    optimizer.zero_grad()
    value = loss(model(words).transpose(1, 2), targets)
    value.backward()
    optimizer.step()
    scheduler.step()
    evener.print("loss", value.item())
