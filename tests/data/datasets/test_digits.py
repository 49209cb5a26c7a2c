from __future__ import annotations

import torch

from evener.data.datasets.digits import digits


def test_the_split_holds_every_digit_once() -> None:
    train, test = digits(train=True), digits(train=False)
    assert (len(train), len(test)) == (1437, 360)
    images = torch.cat([train.tensors[0], test.tensors[0]])
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert images.double().sum().item() * 16 == 561718


def test_labels_are_the_ten_digits_in_both_parts() -> None:
    counts = [torch.bincount(digits(train).tensors[1]) for train in (True, False)]
    assert (counts[0] + counts[1]).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert counts[1].min() > 20


def test_the_split_is_the_same_every_time() -> None:
    assert torch.equal(digits(False).tensors[0], digits(False).tensors[0])
    image, label = digits(True)[0]
    assert image.shape == (1, 8, 8)
    assert label.dtype == torch.int64
