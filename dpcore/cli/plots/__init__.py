"""Pictures of guarantees, filters, runs and comparisons."""
