"""How a rank goes through its micro-batches."""
