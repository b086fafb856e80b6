"""The running mechanism: keys, noise, sums and the one training step."""
