"""What a rank keeps outside of its device's memory: in the host's, or in files, until it is needed.

============  ===============================================================================
``pool``      rooms that are used again: which one for what, and which are let go
``outside``   the memory outside: pinned, or files that are mapped into it
``beside``    copies beside the computing: a stream of its own, and a stand-in for the host
``saved``     what forward passes save for backward
``updates``   the state of the optimizer, which updates one portion of the parameters at a time
``forms``     which tensors can go
``offloaded`` all of it, for a learner
============  ===============================================================================

Of ranks on a GPU everything outside is a copy, and computed with on the device. Ranks on a CPU compute with the mapped
files themselves, which the operating system writes to the disk and reads again as memory is short.
"""
