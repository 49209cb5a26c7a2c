"""A user's own training loop, kept in its form: ``evener.prepare`` and the functions that go with it.

=========================  ===========================================================
:mod:`.prepare`            ``prepare``: recognizes objects, and wraps them where needed
:mod:`.learner_of_loop`    sets models up on a rank, divided as a strategy says
:mod:`.loop_division`      what is divided: the model, or updates, or nothing
:mod:`.divided_model`      optimizers and states of a divided model, whole where they are saved
:mod:`.loop_state`         state that the ranks share while such a loop runs
:mod:`.current_batch`      the batch that it is computing with
:mod:`.dataloader`         a DataLoader that yields this rank's share of each batch
:mod:`.stream`             the same for an iterable data set
:mod:`.batch`              a batch that the loop makes itself, without a DataLoader
:mod:`.loss`               a loss whose value is that of the whole batch
:mod:`.loss_kind`          what kind of loss a function is: made of sums, a mean over rows, or neither
:mod:`.loss_arguments`     what its arguments are: rows, entries for each sample, or the same for all
:mod:`.loss_of_rows`       a loss that each rank computes from the rows of all
:mod:`.sample_tensor`      tensors of this rank's samples, whose sums are taken over all ranks
:mod:`.global_loss`        a sum over all ranks, with this rank's part of the gradient
:mod:`.zero_loss`          a zero loss, for a rank without terms that must run backward
:mod:`.global_loss_value`  a value over all ranks, which detects a divisor of one rank's
:mod:`.gather`             rows of all ranks, with gradients for this rank's own
:mod:`.backward`           backward passes, whatever tensor a loop calls them on
:mod:`.gradient_mean`      gradients, when a backward pass is over
:mod:`.bucket_sums`        sums of gradients that begin in backward
:mod:`.gradient_mark`      whether a gradient is of all ranks
:mod:`.gradient_part`      gradients of divided weights, as the loop sees them
:mod:`.numbers_of_parts`   the norm in ``clip_grad_norm_``, and numbers of DTensors
:mod:`.positions`          checks of sequences that are divided over ranks
:mod:`.optimizer_step`     steps of any optimizer, prepared or not
:mod:`.rank_checks`        checks that values are the same on all ranks, and their errors
:mod:`.late_checks`        checks of numbers that a device is still computing
:mod:`.replicas`           checks that ranks hold the same weights
:mod:`.rng`                random numbers that all ranks draw alike
:mod:`.helpers`            rank, world_size, is_main, print, barrier, gather, draw, no_sync
:mod:`.checkpoint`         save and load
=========================  ===========================================================
"""
