"""The PyTorch edge: per-example gradients, batches and a private optimizer for a torch model."""
