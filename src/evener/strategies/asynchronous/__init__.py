"""Asynchronous training: ranks compute at their own pace, and a parameter server merges their gradients.

======================  =========================================================================
``strategies``          `Asynchronous`: its options, and what it refuses
``stepper``             takes the steps of a section: this rank's worker, and the meeting at the end
``ledger``              decides who computes which samples, and when gradients merge
``recorded_ledger``     the same for a section that is repeated from its records
``server``              adds gradients, and decides with the ledger what merges
``weight_shard``        holds weights, and updates them
``server_log``          several servers, which follow rank 0
``delayed_momentum``    changes the optimizer's momentum once in several updates
``links``               the messages between workers and the server
``buffers``             what passes have changed besides gradients
``flat_parameters``     parameters in a few flat tensors
``state``               gives all ranks the state of the server
======================  =========================================================================

Sections are read in :mod:`evener.data.sections`.
"""
