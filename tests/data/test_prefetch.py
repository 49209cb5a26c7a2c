from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from evener.data.loader import Loader
from evener.data.prefetch import Copy, CopyOnSideStream, NoTransfer, delivery_to
from evener.data.sampler import Order


def test_each_device_gets_the_delivery_that_suits_it() -> None:
    assert isinstance(delivery_to(torch.device("cpu")), NoTransfer)
    assert isinstance(delivery_to(torch.device("meta")), Copy)


@pytest.mark.gpu
def test_cuda_gets_a_side_stream() -> None:
    assert isinstance(delivery_to(torch.device("cuda")), CopyOnSideStream)


def test_a_copy_moves_every_batch_and_closes_its_source() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = Loader(data, Order(10), batch_size=4, device="meta")
    first = next(loader).micro_batches[0]
    assert first.inputs.is_meta
    assert first.targets.is_meta
    assert not first.samples.is_meta
    loader.close()
    assert list(loader) == []
