"""A generator and its critic, as PyTorch trains its DCGAN: two models, two optimizers, three backward passes."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener

NZ = 4


def generator():
    return nn.Sequential(
        nn.Linear(NZ, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh()
    ).double()


def critic():
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid()
    ).double()


def main():
    told, real_label, fake_label = [], 1.0, 0.0
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.rand(38, 6, generator=drawn, dtype=torch.float64))
    dataloader = DataLoader(data, batch_size=8, shuffle=True)
    netG, netD, criterion = generator(), critic(), nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    things = evener.prepare(netG, netD, optimizerG, optimizerD, dataloader, criterion)
    netG, netD, optimizerG, optimizerD, dataloader, criterion = things
    for _epoch in range(3):
        for (real,) in dataloader:
            netD.zero_grad()
            b_size = real.size(0)
            label = torch.full((b_size,), real_label, dtype=torch.float64)
            errD_real = criterion(netD(real).view(-1), label)
            errD_real.backward()
            noise = evener.draw(torch.randn, NZ, dtype=torch.float64)
            fake = netG(noise)
            label.fill_(fake_label)
            errD_fake = criterion(netD(fake.detach()).view(-1), label)
            errD_fake.backward()
            optimizerD.step()
            netG.zero_grad()
            label.fill_(real_label)
            errG = criterion(netD(fake).view(-1), label)
            errG.backward()
            optimizerG.step()
            told += [errD_real.item() + errD_fake.item(), errG.item()]
    return {**netG.state_dict(prefix="G."), **netD.state_dict(prefix="D.")}, told
