"""Per-example gradients as sources: what each operation on a parameter saw, and the gradient of its output."""
