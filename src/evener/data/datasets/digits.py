"""Images of handwritten digits that ship with the package, so a first training needs no download.

The 1,797 images of 8 x 8 pixels are the test set of "Optical Recognition of Handwritten Digits" by E.
Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, licensed CC BY
4.0 (https://creativecommons.org/licenses/by/4.0/). They are stored as one compressed table. Each row holds 64 pixels
from 0 to 16 and the label.
"""

from __future__ import annotations

import gzip
from importlib.resources import files

import numpy as np
import torch
from torch.utils.data import TensorDataset

TRAIN_SIZE = 1437
"""Samples of the training set. The other 360 of the 1,797 are the test set."""


def digits(train: bool) -> TensorDataset:
    """Returns pairs of an image, float32 ``(1, 8, 8)`` from 0 to 1, and its label, int64 from 0 to 9.

    Args:
        train: True for the training set of 1,437 samples, False for the test set of 360. The split is fixed.
    """
    packed = files("evener.data.datasets").joinpath("digits.csv.gz").read_bytes()
    table = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",", dtype=np.int64)
    shuffled = np.random.RandomState(0).permutation(len(table))  # NumPy keeps this stream as it is for good
    rows = torch.from_numpy(table[shuffled[:TRAIN_SIZE] if train else shuffled[TRAIN_SIZE:]])
    images = rows[:, :64].to(torch.float32).div_(16).reshape(-1, 1, 8, 8)
    return TensorDataset(images, rows[:, 64].clone())
