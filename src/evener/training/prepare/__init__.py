"""A training loop of the user's own, which keeps its shape: ``evener.prepare`` and what goes with it.

=========================  ===========================================================
:mod:`.prepare`            ``prepare``: which object is what, and what becomes of it
:mod:`.loop_state`         what the ranks share while such a loop runs
:mod:`.dataloader`         a DataLoader that gives this rank its share of each batch
:mod:`.batch`              a batch that the loop makes itself, without a DataLoader
:mod:`.loss`               a loss whose value is that of all ranks
:mod:`.loss_kind`          what kind of loss a function is: made of sums, a mean over rows, or neither
:mod:`.sample_tensor`      tensors of this rank's samples, whose sums become those of all
:mod:`.global_loss`        a sum of all ranks, with this rank's part of the gradient
:mod:`.zero_loss`          a loss of no term, to go backward from
:mod:`.global_loss_value`  a number of all ranks, which notices a divisor of one rank's
:mod:`.gather`             rows of all ranks, with the gradients of one's own
:mod:`.backward`           backward passes, of whatever a loop calls them on
:mod:`.gradient_mean`      gradients, when a backward pass is over
:mod:`.optimizer_step`     steps of any optimizer, prepared or not
:mod:`.rank_checks`        what has to be the same on all ranks, and the words where it is not
:mod:`.rng`                random numbers that all ranks draw alike
:mod:`.helpers`            rank, world_size, is_main, print, barrier, gather, draw, no_sync
:mod:`.checkpoint`         save and load
=========================  ===========================================================
"""
