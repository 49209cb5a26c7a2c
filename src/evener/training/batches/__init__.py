"""Batches for the ranks: shares, progress, skipped samples, and reading processes."""
