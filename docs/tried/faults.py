"""A run with two faults, for `dpcore doctor`: a layer that mixes examples, and an example that is not a number."""

import torch

import dpcore
from dpcore.torch import make_private

torch.manual_seed(0)
inputs, labels = torch.rand(256, 20), torch.randint(10, (256,))
inputs[3, 0] = float("nan")
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 10))
method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=32)
private = make_private(model, (inputs, labels), method, epochs=1, target_delta=1e-5)
