from __future__ import annotations

import pytest

from evener.data.workers import WORKERS_PER_CORE, Workers
from evener.errors import ConfigurationError
from evener.hardware.survey.host import allowed_cores


def test_a_number_of_workers_that_would_take_the_machine_is_refused() -> None:
    most = WORKERS_PER_CORE * allowed_cores()
    assert Workers(most).count == most
    with pytest.raises(ConfigurationError, match=f"at most {most}, which is {WORKERS_PER_CORE} a core"):
        Workers(most + 1)
