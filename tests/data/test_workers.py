from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from evener.data.loader import Loader
from evener.data.workers import WORKERS_PER_CORE, Workers
from evener.errors import ConfigurationError
from evener.hardware.survey.host import allowed_cores


def test_a_number_of_workers_that_would_take_the_machine_is_refused() -> None:
    most = WORKERS_PER_CORE * allowed_cores()
    assert Workers(most).count == most
    with pytest.raises(ConfigurationError, match=f"at most {most}, which is {WORKERS_PER_CORE} a core"):
        Workers(most + 1)


class Drawn(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.rand(()), index


def test_workers_that_begin_elsewhere_draw_other_numbers() -> None:
    def drawn(start: tuple[int, int]) -> list[float]:
        with Loader(
            Drawn(), None, batch_size=4, workers=1, start_method="fork", epochs=2, start=start
        ) as loader:
            return [x for batch in loader for x in batch.micro_batches[0].inputs.tolist()]

    starts = drawn((0, 0)), drawn((0, 4)), drawn((1, 0))
    assert len({number for numbers in starts for number in numbers}) == 16 + 12 + 8
    assert drawn((0, 4)) == starts[1]
