"""Batteries that tell whether a part of your own keeps the promises of its interface.

Each raises :class:`ConformanceError`, which says which promise is broken, on what input. Evener's own parts pass the
same ones. They need no test framework: call them in a test, or at a prompt::

    from evener.testing import check_all_reduce, check_balancer, check_strategy

    check_all_reduce("stars:make_star", processes=3)
    check_balancer("alternating:Alternating", world_size=2)
    check_strategy("flat:Flat", processes=(2, 3))
"""

from evener.tools.conformance.all_reduces import check_all_reduce
from evener.tools.conformance.balancers import check_balancer
from evener.tools.conformance.errors import ConformanceError
from evener.tools.conformance.strategies import check_strategy

__all__ = ["ConformanceError", "check_all_reduce", "check_balancer", "check_strategy"]
