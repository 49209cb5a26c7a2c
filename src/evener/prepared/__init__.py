"""A training loop of the user's own, which keeps its shape: ``evener.prepare`` and what goes with it.

====================  ===========================================================
:mod:`.preparing`     ``prepare``: which object is what, and what becomes of it
:mod:`.place`         what the ranks share while such a loop runs
:mod:`.loading`       a DataLoader that gives this rank its share of each batch
:mod:`.losses`        a loss whose value is that of all ranks
:mod:`.summing`       gradients, when a backward pass is over
:mod:`.random`        random numbers that all ranks draw alike
:mod:`.helpers`       rank, world_size, is_main, print, barrier, gather, draw, no_sync
:mod:`.files`         save and load
====================  ===========================================================
"""
