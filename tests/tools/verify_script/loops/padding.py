"""A network that reads the padding of its sentences, which is as long as the longest sentence of a rank's share."""

import torch
from parts import rows, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader

import evener


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    words = nn.utils.rnn.pad_sequence([x[: 1 + int(y), None] for x, y in samples], batch_first=True)
    return words, torch.stack([y for _, y in samples])


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.states, self.last = nn.RNN(1, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.last(self.states(words)[0][:, -1])
        return found


torch.manual_seed(4)
model = LastState().double()
optimizer, data = sgd(model), DataLoader(rows(), batch_size=8, shuffle=True, collate_fn=padded)
model, optimizer, data, loss = evener.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for words, targets in data:
    optimizer.zero_grad()
    value = loss(model(words), targets)  # parts
    value.backward()
    optimizer.step()
