"""Whether all ranks train the same thing: at the start, and while they train."""
