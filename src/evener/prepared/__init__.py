"""A training loop of the user's own, which keeps its shape: ``evener.prepare`` and what goes with it.

====================  ===========================================================
:mod:`.preparing`     ``prepare``: which object is what, and what becomes of it
:mod:`.place`         what the ranks share while such a loop runs
:mod:`.loading`       a DataLoader that gives this rank its share of each batch
:mod:`.batches`       a batch that the loop makes itself, without a DataLoader
:mod:`.losses`        a loss whose value is that of all ranks
:mod:`.trial`         what kind of loss a function is: made of sums, a mean over rows, or neither
:mod:`.own`           tensors of this rank's samples, whose sums become those of all
:mod:`.joining`       a sum of all ranks, with this rank's part of the gradient
:mod:`.silence`       a loss of no term, to go backward from
:mod:`.whole`         a number of all ranks, which notices a divisor of one rank's
:mod:`.gathering`     rows of all ranks, with the gradients of one's own
:mod:`.passes`        backward passes, of whatever a loop calls them on
:mod:`.summing`       gradients, when a backward pass is over
:mod:`.updates`       steps of any optimizer, prepared or not
:mod:`.agreeing`      what has to be the same on all ranks, and the words where it is not
:mod:`.random`        random numbers that all ranks draw alike
:mod:`.helpers`       rank, world_size, is_main, print, barrier, gather, draw, no_sync
:mod:`.files`         save and load
====================  ===========================================================
"""
