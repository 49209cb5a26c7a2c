"""Verifies that training on several ranks equals training on one device: takes the same steps both ways and compares.

Sums of floating-point numbers depend on the order of addition, and dividing the work changes that order. So the runs
differ in the last bits. How far rounding alone drives them apart depends on the model, the optimizer, the dtype and the
number of steps. So it is *measured*, on runs that differ from the reference by rounding alone::

    one device ──────────────────────────▶ reference ──┬─ difference ─┐
    divided over ranks ──────────────────▶ divided ────┘              ├─▶ difference / floor <= LIMIT ?
    one device, last bits disturbed ─────▶ disturbed ───── floor ─────┘
    and samples in another order

======================  ==================================================================
``trajectory``          takes the steps of one run; records losses, gradients, weights
``perturbation``        disturbs the last bits of the weights and the order of the samples
``rounding_floor``      distances, floors, and which gradients are rounding noise
``comparison``          the record of a comparison
``hints``               the first difference, and its likely cause
``verification``        runs it all
``bits``                compares the bits of runs that are exact in bits
======================  ==================================================================

:mod:`evener.tools.verify_script` does the same for a user's script.
"""

from evener.tools.verify.bits import BitsVerification, verify_bits
from evener.tools.verify.comparison import Verification, relative_error
from evener.tools.verify.trajectory import Trajectory, record
from evener.tools.verify.verification import verify

__all__ = [
    "BitsVerification",
    "Trajectory",
    "Verification",
    "record",
    "relative_error",
    "verify",
    "verify_bits",
]
