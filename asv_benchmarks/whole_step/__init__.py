"""One training step of several models by several libraries: what `training_vs_peers.py` measures."""
