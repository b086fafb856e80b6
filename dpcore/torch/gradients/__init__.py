"""The graph of a model: captured, proved to keep the examples apart, and run for their gradients."""
