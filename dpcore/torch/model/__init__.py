"""The user's model: checks, per-example gradients, micro-batches."""
