"""Checks that all ranks train the same thing: at the start, and during training."""
