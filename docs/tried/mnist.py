"""The model of Opacus's MNIST example, by dpcore: two epochs on the four files of MNIST in a folder."""

import sys
import time

import torch
from torch import nn

import dpcore
from dpcore.cli.datasets import load  # reads MNIST's own files; any tensors or Dataset do
from dpcore.torch import make_private

torch.manual_seed(0)
mnist = load("mnist", sys.argv[1])
train = torch.tensor(mnist.train_inputs), torch.tensor(mnist.train_targets)
test = torch.tensor(mnist.test_inputs), torch.tensor(mnist.test_targets)

model = nn.Sequential(
    nn.Conv2d(1, 16, 8, 2, padding=3),
    nn.ReLU(),
    nn.MaxPool2d(2, 1),
    nn.Conv2d(16, 32, 4, 2),
    nn.ReLU(),
    nn.MaxPool2d(2, 1),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 32),
    nn.ReLU(),
    nn.Linear(32, 10),
)
method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=64)
private = make_private(model, train, method, epochs=2, target_delta=1e-5, loss=nn.functional.cross_entropy)
print(private)
for epoch in range(2):
    begin = time.time()
    model.train()
    for batch in private.loader:
        private.step(batch)
    model.eval()
    with torch.no_grad():
        accuracy = (model(test[0]).argmax(1) == test[1]).float().mean()
    print(f"epoch {epoch + 1}: {100 * accuracy:.2f} %, epsilon {private.epsilon():.3f}, {time.time() - begin:.0f} s")
