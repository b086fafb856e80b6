"""Writes opacus-*.pt and opacus.json beside it: checkpoints that Opacus 1.6 saved, and the epsilons that it reports.

Not run by the tests: it needs Opacus, which the environment does not have.

    python -m pip install --no-deps --target /tmp/opacus opacus==1.6 opt_einsum
    PYTHONPATH=/tmp/opacus python tests/golden/make_opacus.py
"""

import json
import warnings
from pathlib import Path
from typing import Any

import opacus  # type: ignore[import-not-found]
import torch
from opacus.schedulers import LambdaNoise  # type: ignore[import-not-found]

HERE = Path(__file__).parent
DELTAS = (1e-3, 1e-5)
# name: accountant, noise multiplier, its factor after each epoch (None: constant), batch size of 200 examples, epochs
RUNS: dict[str, tuple[str, float, float | None, int, int]] = {
    "prv": ("prv", 1.1, None, 10, 3),
    "rdp": ("rdp", 1.3, 0.9, 20, 4),
    "gdp": ("gdp", 0.8, None, 25, 2),
}


def train(accountant: str, noise: float, factor: float | None, batch_size: int, epochs: int, path: Path) -> Any:
    """Train a model of three parameters and save the checkpoint; return the accountant."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.randn(200, 2), torch.randn(200, 1))
    engine = opacus.PrivacyEngine(accountant=accountant)
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=batch_size),
        noise_multiplier=noise,
        max_grad_norm=1.0,
    )
    schedule = None if factor is None else LambdaNoise(optimizer, noise_lambda=lambda epoch: factor**epoch)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(inputs), targets).backward()
            optimizer.step()
        if schedule is not None:
            schedule.step()
    engine.save_checkpoint(path=path, module=module, optimizer=optimizer)
    return engine.accountant


def main() -> None:
    """Write the files."""
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {"opacus": opacus.__version__}
    for name, (accountant, *settings) in RUNS.items():
        kept = train(accountant, *settings, HERE / f"opacus-{name}.pt")
        told[name] = {**kept.state_dict(), "epsilons": {str(delta): float(kept.get_epsilon(delta)) for delta in DELTAS}}
    (HERE / "opacus.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
