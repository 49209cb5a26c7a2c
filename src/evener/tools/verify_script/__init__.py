"""Verifies a user's script whose training loop ``evener.prepare`` divides: ``evener verify loop.py``.

The script runs unchanged, on one device and on several ranks with uneven shares. A recorder observes each batch, the
value of each prepared loss, the value of each ``backward()``, gradients before and weights after each optimizer step,
and what rank 0 prints. These *events* are compared as :mod:`evener.tools.verify` compares steps: the floor is measured
in runs on one device with disturbed weights. The first event beyond its floor has a line of the script::

    one device ───────▶ batch  loss  backward  step  batch  loss ...      reference
    disturbed ────────▶ batch  loss  backward  step  batch  loss ...      floor of each event
    each of N ranks ──▶ batch  loss  backward  step  batch  loss ...
                                        ╰── first beyond the floor: loop.py:14, `value.backward()`

On one device a loss is the function that the script passed, in plain PyTorch.

==================  ==================================================================
``events``          the record of a run
``recorder``        records a run
``printed_output``  records what is printed, and compares the numbers in it
``workplace``       the directory in which a run may write
``script_run``      one run on one rank, and several runs at a time
``comparison``      finds the first event at which two runs differ
``causes``          derives the likely cause
``verify``          runs it all
==================  ==================================================================
"""

from evener.tools.verify_script.verify import ScriptVerification, verify_script

__all__ = ["ScriptVerification", "verify_script"]
