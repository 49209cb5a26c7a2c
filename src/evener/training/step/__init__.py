"""One step over all ranks: counts and sums, values that are not finite, and steps of the user's own loop."""
