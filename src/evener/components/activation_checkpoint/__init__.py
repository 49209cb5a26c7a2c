"""Activation checkpointing: blocks are computed again in backward and do not keep their activations (Chen et al. 2016).

===================  =======================================================================
``forward``          the ``forward`` of a block, with or without checkpointing
``written_buffers``  keeps a recomputation from writing into buffers a second time
``profiling``        measures what each block holds, and predicts the peaks that follow
===================  =======================================================================
"""
