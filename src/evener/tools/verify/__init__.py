"""The proof: the same steps on one device and divided over ranks, and how far the runs then lie apart.

Sums of floating-point numbers depend on the order in which they are added, and a division of the work changes that
order. So the runs are not equal to the last bit. How far rounding alone drives them apart depends on the model, the
optimizer, the type and the number of steps; it is *measured*, on runs that differ from the reference by nothing else::

    one device ──────────────────────────▶ reference ──┬─ difference ─┐
    divided over ranks ──────────────────▶ divided ────┘              ├─▶ difference / floor <= LIMIT ?
    one device, last bits disturbed ─────▶ disturbed ───── floor ─────┘
    and samples in another order

======================  ==================================================================
``recording``           takes the steps of one run, remembers losses, gradients, weights
``disturbing``          the last bits of the weights, the order of the samples
``floor``               distances, floors, and which gradients are only rounding
``verdict``             the record of a comparison
``hints``               where two runs part, and what that tells of the cause
``proof``               runs it all
``script``              the same for a script of the user's own
======================  ==================================================================
"""

from evener.tools.verify.comparison import Verification, relative_error
from evener.tools.verify.trajectory import Trajectory, record
from evener.tools.verify.verification import verify

__all__ = ["Trajectory", "Verification", "record", "relative_error", "verify"]
