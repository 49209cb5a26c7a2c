"""What all-reduces cost, measured or simulated, and which one to use for which size."""
