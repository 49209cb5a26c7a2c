"""Steppers: run a rank's micro-batches, as a whole or in pieces that fit into memory."""
