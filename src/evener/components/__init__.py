"""Components of strategies: precision, compilation, activation checkpointing, offload, optimizers and checks. This
package knows no strategy."""
