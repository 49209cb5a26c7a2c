"""Tensors that are divided into shards over the ranks."""
