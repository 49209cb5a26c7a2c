"""Digits, as PyTorch's MNIST example trains them: functions for training and testing, a scheduler by epoch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 9, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def digits(count, seed):
    drawn = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 8, 8, generator=drawn, dtype=torch.float64)
    return TensorDataset(images, torch.randint(10, (count,), generator=drawn))


def train(model, device, train_loader, loss_of, optimizer, told):
    model.train()
    for data, target in train_loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = loss_of(output, target)
        loss.backward()
        optimizer.step()
        told.append(loss.item())


def test(model, device, test_loader, told):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    told.append(test_loss / len(test_loader.dataset))
    told.append(correct / len(test_loader.dataset))


def main():
    device, told = torch.device("cpu"), []
    train_loader = DataLoader(digits(53, 1), batch_size=10, shuffle=True)
    test_loader = DataLoader(digits(23, 2), batch_size=9)
    model, loss_of = Net().double().to(device), F.nll_loss
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _epoch in range(3):
        train(model, device, train_loader, loss_of, optimizer, told)
        test(model, device, test_loader, told)
        scheduler.step()
    return model.state_dict(), told
