"""Saved runs: checkpoints, and parameters as safetensors."""
