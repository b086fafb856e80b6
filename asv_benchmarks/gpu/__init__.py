"""The first half hour on a GPU: checks, then kernels and training steps timed by CUDA events. `make gpu` runs it."""
