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


def doubled(leaf: torch.Tensor) -> torch.Tensor:
    return 2 * leaf


def test_each_leaf_is_converted_on_the_device_and_its_copy_on_the_host_is_not() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10.0))
    there = next(Loader(data, None, batch_size=4, convert=doubled))
    assert there.micro_batches[0].inputs.tolist() == [0, 2, 4, 6]
    assert there.micro_batches[0].targets.tolist() == [0, 2, 4, 6]
    copied = next(Loader(data, None, batch_size=4, device="meta", convert=lambda leaf: leaf.half()))
    assert copied.micro_batches[0].inputs.dtype == torch.half
    assert copied.micro_batches[0].inputs.is_meta
    assert copied.on_host is not None
    assert copied.on_host.micro_batches[0].inputs.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_micro_batches_are_cut_on_the_device_and_on_the_host(device: str) -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = Loader(data, None, batch_size=4, device=device, piece=lambda micro: micro.rows(1, 3))
    batches = list(loader)
    assert [len(batch.micro_batches[0].inputs) for batch in batches] == [2, 2, 1]
    on_host = batches[1].on_host or batches[1]
    assert on_host.micro_batches[0].inputs.tolist() == [5, 6]
    assert on_host.shares == batches[1].shares == (4,)
