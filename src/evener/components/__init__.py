"""What strategies are built of: precision, compiling, recomputation, offloading, optimizers and checks. No strategy
is known here."""
