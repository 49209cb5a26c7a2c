"""Shared memory of the ranks of one host."""
