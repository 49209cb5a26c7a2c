"""Optimizers that are fused, or keep their state in 8 bits."""
