"""The interval between checkpoints that loses least time, and the share of a run's time in which steps count.

A short interval spends much time on checkpoints, a long one repeats many steps after a failure. Failures are a Poisson
process: they come at random, and on average once in ``mtbf``, the mean time between failures of the whole run. After
one, the run needs ``recovery`` seconds until it trains again from its last checkpoint, and it may fail in these too.

All functions count the *stall* of a checkpoint: the seconds in which training stands still. A thread may go on writing
after it. If a failure comes before the thread is done, the run falls back to the checkpoint before, and repeats on
average as many seconds more as the writing takes. So add the seconds of such writing to ``recovery``. An interval is
the time of training between two checkpoints, without their stalls.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math


def young_interval(stall: float, mtbf: float) -> float:
    """Returns Young's interval, ``sqrt(2 stall mtbf)``, in seconds. It is good where the stall is far below ``mtbf``.

    Raises:
        ValueError: If ``stall`` is negative, ``mtbf`` is not positive, or one of them is not finite.
    """
    _refuse_other_than_times(stall=stall, mtbf=mtbf)
    return math.sqrt(2 * stall * mtbf)


def daly_interval(stall: float, mtbf: float) -> float:
    """Returns Daly's interval, in seconds. It is good for stalls of up to half of ``mtbf``.

    From twice ``mtbf`` on it is ``mtbf``: then hardly any checkpoint is completed.

    Raises:
        ValueError: If ``stall`` is negative, ``mtbf`` is not positive, or one of them is not finite.
    """
    first_order = young_interval(stall, mtbf)
    ratio = stall / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return first_order * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def expected_goodput(interval: float, stall: float, recovery: float, mtbf: float) -> float:
    """Returns the expected share of time in which steps count, from 0 to 1.

    Other time goes into stalls, recoveries, and steps that are repeated. The formula is Daly's complete cost function,
    which is exact for this model: an interval takes ``mtbf exp(recovery / mtbf) (exp((interval + stall) / mtbf) - 1)``
    seconds on average.

    Args:
        interval: Seconds of training between two checkpoints.
        stall: Seconds in which training stands still for a checkpoint.
        recovery: Seconds from a failure until the run trains again.
        mtbf: Mean time between failures of the whole run, in seconds.

    Raises:
        ValueError: If ``interval`` or ``mtbf`` is not positive, another time is negative, or one is not finite.
    """
    _refuse_other_than_times(stall=stall, recovery=recovery, mtbf=mtbf)
    if not 0 < interval < math.inf:
        raise ValueError(f"an interval between checkpoints is a positive number of seconds, got {interval}")
    attempt = (interval + stall) / mtbf
    return interval / mtbf * math.exp(-attempt - recovery / mtbf) / -math.expm1(-attempt)


def _refuse_other_than_times(mtbf: float, **others: float) -> None:
    wrong = [f"{name}={value}" for name, value in others.items() if not 0 <= value < math.inf]
    if wrong or not 0 < mtbf < math.inf:
        raise ValueError(
            "stall and recovery are finite numbers of seconds of at least 0, and the mean time between failures is a "
            f"positive one; got {', '.join([*wrong, f'mtbf={mtbf}'])}"
        )
