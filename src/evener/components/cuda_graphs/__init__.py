"""CUDA graphs of forward and backward: recorded once for each shape of a batch, replayed, and compared with eager
passes."""
