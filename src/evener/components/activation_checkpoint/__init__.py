"""Blocks of a model that are computed again in backward, in place of keeping what they made (Chen et al. 2016).

=============  =================================================================
``forward``    a block that is kept, computed again, or partly
``buffers``    what forward writes into must not be written twice
``measuring``  what each block holds, when, and how long it takes
``policy``     which blocks, for a budget at the least time: a pure function
``words``      what people are told of it
=============  =================================================================
"""
