"""Local steps: each replica takes optimizer steps of its own, and replicas merge every ``sync_every`` batches.

======================  =========================================================================
``strategies``          `LocalSgd` and `DiLoCo`: their options, and what they refuse
``stepper``             takes the steps of a round
``replicas``            the replicas that a rank carries: weights, buffers, optimizer state
``merge``               merges differences of weights by counts, with an outer optimizer
``quorum``              decides which replicas merge, if a merge does not wait for all
``buffers``             merges running statistics by the law of total variance
======================  =========================================================================

Which samples a replica trains on is decided in :mod:`evener.data.rounds`.
"""
