"""Blocks of a model that are computed again in backward, in place of keeping what they made (Chen et al. 2016).

===================  ===========================================================
``forward``          a block that is kept, or computed again
``written_buffers``  what forward writes into must not be written twice
``profiling``        what each block holds, and the peaks that follow from it
===================  ===========================================================
"""
