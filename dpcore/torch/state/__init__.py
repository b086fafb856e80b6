"""Saved runs: checkpoints."""
