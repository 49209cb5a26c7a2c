"""One step over all ranks: its counts and sums, what is not finite, and loops by hand."""
