"""The proof for a script of the user's own, whose loop ``evener.prepare`` divides: ``evener verify loop.py``.

The script runs as it is, on one device and on several ranks with uneven shares, and is watched from within: which batch
it gets, the value of each prepared loss, the value of each ``backward()``, gradients before and weights after each
optimizer's step, and what rank 0 prints. These *events* are the steps of the proof
(:mod:`evener.tools.verify`): the floor is measured on runs on one device whose weights are disturbed, and the first
event that lies beyond it has a line of the script::

    one device ───────▶ batch  loss  backward  step  batch  loss ...      reference
    disturbed ────────▶ batch  loss  backward  step  batch  loss ...      floor of each event
    each of N ranks ──▶ batch  loss  backward  step  batch  loss ...
                                        ╰── first beyond the floor: loop.py:14, `value.backward()`

On one device a loss is the function that the script gave, in plain PyTorch.

===============  ==================================================================
``events``       what is remembered of a run
``recording``    the watch that remembers it
``printing``     what is printed, and which numbers in it differ
``workplace``    the directory in which a run may write
``running``      one run on one rank, and several at once
``parting``      the first event at which two runs part
``causes``       what that tells of the cause
``proof``        runs it all
===============  ==================================================================
"""

from evener.tools.verify_script.verify import ScriptVerification, verify_script

__all__ = ["ScriptVerification", "verify_script"]
