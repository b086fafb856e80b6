"""Models, data and losses for the doctor: planted faults, with the check that names each, and honest ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpcore import methods
from dpcore.sampling import PoissonSampler, UserSampler
from tests.unit.torch.models import Called

Objects = dict[str, Any]
AT = {"lr": 0.1, "noise_multiplier": 1.0, "batch_size": 6}


def numbers(count: int = 24, size: int = 6, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.empty(count, size).normal_(generator=generator)
    return inputs, torch.randint(classes, (count,), generator=generator)


def numbers_with(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a function makes of these inputs and labels."""
    return change(*numbers())


def images(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = numbers(count, 64)
    return inputs.view(count, 1, 8, 8), labels


def tokens(count: int = 24, length: int = 5, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return (
        torch.randint(vocabulary, (count, length), generator=generator),
        torch.randint(3, (count,), generator=generator),
    )


def objects(model: nn.Module, data: Any = None, **more: Any) -> Objects:
    """The keywords of a call of the doctor."""
    data = numbers() if data is None else data
    return {"method": methods.dp_sgd(**AT), "steps": 8, **more, "model": model, "data": data}


def mlp(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *more, nn.ReLU(), nn.Linear(8, 3))


def conv(*more: nn.Module, features: int = 72) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), *more, nn.Flatten(), nn.Linear(features, 3))


class Rows(Dataset[Any]):
    """Examples of `numbers` by index; `read` says what is read for an index."""

    def __init__(self, read: Callable[[Rows, int], Any] = lambda rows, index: rows.at(index), count: int = 24) -> None:
        self.inputs, self.labels = numbers(count)
        self.place, self.read = 0, read

    def at(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]

    def any(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.at(int(torch.randint(len(self), ())))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.read(self, index)


def next_row(rows: Rows, index: int) -> Any:
    rows.place += 1
    return rows.at(rows.place % len(rows))


# ------------------------------------------------------------------------------------------------------ planted faults

LOUD = "DPCORE_TEST_LOUD"


def state_in_the_environment() -> Objects:
    """Turns the examples after a loud one around; made-up values are never loud, and nothing reachable changes."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        left = int(os.environ.get(LOUD, "0"))
        os.environ[LOUD] = "8" if x.abs().max() > 50 else str(max(left - 1, 0))
        return -model.inner(x) if left else model.inner(x)

    os.environ.pop(LOUD, None)
    inputs, labels = numbers()
    inputs[16] *= 1000  # the one that takes the place of each of the first 16
    return objects(Called(forward, inner=mlp()), (inputs, labels))


def running_mean_in_a_buffer() -> Objects:
    model = Called(running)
    model.register_buffer("mean", torch.zeros(8))
    return objects(mlp(model))


def running(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - model.mean


def counting(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += len(x)
    return x


def loss_with_a_memory() -> Objects:
    kept: list[float] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(output, target)
        kept.append(float(value.detach()))
        return value

    return objects(mlp(), loss=loss)


def two_parameters_in_one_memory() -> Objects:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = nn.Parameter(model[0].weight.data)  # a new parameter of the same memory
    return objects(model)


def centered(examples: list[Any]) -> Any:
    inputs = torch.stack([x for x, _ in examples])
    return inputs - inputs.mean(0), torch.stack([y for _, y in examples])


def with_nan(inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    inputs[[3, 17], 2] = float("nan")
    return inputs, labels


def with_zeros(inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    inputs = inputs.abs()
    inputs[::4] = 0.0
    return inputs, labels


WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
TOLD = {
    "mixing": "are mixed|number of examples",
    "state": "changes its|changes while|first from later",
    "loss": "^loss",
    "frozen parameters": "without a parameter",
    "unregistered tensors": "not registered|is no parameter of the model",
    "dtypes": "^data: inputs of float64|failed on inputs that are public, or made up|^parameters of dtypes",
    "plan": "^(batch_size|noise_multiplier|target_|sampling)",
    "forward": "failed on inputs that are public, or made up",
}
"""What `make_private` refuses, and words of its sentence."""

FAULTS: dict[str, tuple[str, Callable[[], Objects]]] = {
    "batch_norm": ("layers", lambda: objects(mlp(nn.BatchNorm1d(8)))),
    "mean_over_the_batch": ("mixing", lambda: objects(mlp(Called(lambda m, x: x - x.mean(0, keepdim=True))))),
    "state_in_the_environment": ("isolation", state_in_the_environment),
    "running_mean_in_a_buffer": ("state", running_mean_in_a_buffer),
    "counter_in_the_model": ("state", lambda: objects(mlp(Called(counting, calls=0)))),
    "loss_with_a_memory": ("state", loss_with_a_memory),
    "contrastive_loss": (
        "loss", lambda: objects(mlp(), loss=lambda out, _: F.cross_entropy(out @ out.T, torch.arange(len(out)))),
    ),
    "outputs_in_a_column_and_targets_in_a_row": (
        "loss", lambda: objects(nn.Linear(6, 1), numbers_with(lambda x, y: (x, y.float())), loss=F.mse_loss),
    ),
    "loss_without_reduction": (
        "loss", lambda: objects(mlp(), (numbers()[0], torch.zeros(24, 3)), loss=nn.MSELoss(reduction="none")),
    ),
    "class_weights_under_the_mean": ("loss", lambda: objects(mlp(), loss=nn.CrossEntropyLoss(weight=WEIGHTS))),
    "detached_output": ("loss", lambda: objects(mlp(), loss=lambda out, y: F.cross_entropy(out.detach(), y))),
    "all_frozen": ("frozen parameters", lambda: objects(mlp().requires_grad_(False))),
    "two_parameters_in_one_memory": ("tied parameters", two_parameters_in_one_memory),
    "layers_in_a_list": (
        "unregistered tensors",
        lambda: objects(Called(lambda m, x: m.head(m.hidden[0](x)), hidden=[nn.Linear(6, 6)], head=nn.Linear(6, 3))),
    ),
    "dropout_in_eval_mode": ("mode", lambda: objects(mlp(nn.Dropout(0.5)).eval())),
    "doubles_into_floats": ("dtypes", lambda: objects(mlp(), numbers_with(lambda x, y: (x.double(), y)))),
    "rows_of_nan": ("finite values", lambda: objects(mlp(), numbers_with(with_nan))),
    "logarithm_of_zero": (
        "finite gradients",
        lambda: objects(Called(lambda m, x: m.head(x.abs().log()), head=nn.Linear(6, 3)), numbers_with(with_zeros)),
    ),
    "labels_out_of_range": ("make_private", lambda: objects(mlp(), numbers_with(lambda x, y: (x, y + 1)))),
    "data_that_shuffle_themselves": ("reading", lambda: objects(mlp(), Rows(lambda rows, _: rows.any()))),
    # No label tells: an example turns up at another index.
    "data_of_one_label_that_shuffle_themselves": (
        "reading", lambda: objects(mlp(), Rows(lambda rows, _: (rows.any()[0], rows.labels[0]))),
    ),
    # None of those that are read turns up at another index that is read: their labels tell.
    "many_data_that_shuffle_themselves": ("reading", lambda: objects(mlp(), Rows(lambda rows, _: rows.any(), 4000))),
    "data_that_go_on": ("reading", lambda: objects(mlp(), Rows(next_row))),
    "augmentation_that_no_seed_reaches": (
        "reading",
        lambda: objects(mlp(), Rows(lambda rows, k: (rows.inputs[k] + os.urandom(1)[0] / 256, rows.labels[k]))),
    ),
    "collate_that_centers_the_batch": ("reading", lambda: objects(mlp(), Rows(), collate_fn=centered)),
    "sentences_of_different_lengths": (
        "reading",
        lambda: objects(nn.Linear(4, 3), [(torch.zeros(4 + k % 3), torch.tensor(k % 3)) for k in range(24)]),
    ),
    "a_loader_for_data": (
        "data", lambda: objects(mlp(), DataLoader(TensorDataset(*numbers()), batch_size=4, shuffle=True)),
    ),
    "batches_larger_than_the_data": (
        "plan", lambda: objects(mlp(), method=methods.dp_sgd(**{**AT, "batch_size": 100})),
    ),
    "inputs_of_another_width": ("forward", lambda: objects(nn.Linear(7, 3))),
}  # fmt: skip

# -------------------------------------------------------------------------------------------------------------- honest


def encoder() -> nn.Module:
    body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Called(lambda m, ids: m.head(m.body(m.table(ids)).mean(1)), table=nn.Embedding(11, 8), body=body,
                  head=nn.Linear(8, 3))  # fmt: skip


def tied_embeddings() -> Objects:
    model = Called(lambda m, ids: m.head(m.body(m.table(ids)).tanh()).transpose(1, 2), table=nn.Embedding(11, 6),
                   body=nn.Linear(6, 6), head=nn.Linear(6, 11, bias=False))  # fmt: skip
    model.head.weight = model.table.weight
    ids, _ = tokens()
    return objects(model, (ids[:, :-1], ids[:, 1:]))


def lora() -> Objects:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    return objects(peft.get_peft_model(mlp(), peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0)))


def frozen_batch_norm() -> Objects:
    model = mlp(nn.BatchNorm1d(8))
    model(numbers()[0])  # public statistics
    model[1].eval().requires_grad_(False)
    return objects(model)


def mixed_dtypes() -> Objects:
    parts = {"body": nn.Linear(6, 8).bfloat16(), "head": nn.Linear(8, 3)}
    return objects(Called(lambda m, x: m.head(m.body(x.bfloat16()).float().tanh()), **parts))


def mapping_of_inputs() -> Objects:
    parts = {"table": nn.Embedding(11, 4), "numbers": nn.Linear(6, 4), "head": nn.Linear(4, 3)}
    model = Called(lambda m, ids, values: m.head(m.table(ids).mean(1) + m.numbers(values)), **parts)
    return objects(model, ({"ids": tokens()[0], "values": numbers()[0]}, tokens()[1]))


def augmented(rows: Rows, index: int) -> Any:
    inputs, label = rows.at(index)
    return inputs + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand()), label  # noqa: NPY002


def adam_with_groups() -> Objects:
    model = mlp()
    groups = [{"params": list(model[0].parameters()), "lr": 0.01}, {"params": list(model[2].parameters())}]
    return objects(model, method=methods.dp_adam(**AT), params=groups)


def users() -> UserSampler:
    return UserSampler(PoissonSampler(dataset_size=12, batch_size=6), np.arange(24) % 12, 2)


SUMMED = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)
HONEST: dict[str, Callable[[], Objects]] = {
    "logistic": lambda: objects(nn.Linear(6, 3)),
    "perceptron": lambda: objects(mlp(), method=methods.disk(**AT), loss=SUMMED),
    "dropout": lambda: objects(mlp(nn.Dropout(0.3))),
    "convolutions": lambda: objects(conv(nn.ReLU(), nn.MaxPool2d(2), features=18), images()),
    "transformer_encoder": lambda: objects(encoder(), tokens()),
    "tied_embeddings": tied_embeddings,
    "lora": lora,
    "frozen_batch_norm": frozen_batch_norm,
    "half_precision": lambda: objects(mlp().bfloat16(), numbers_with(lambda x, y: (x.bfloat16(), y))),
    "mixed_dtypes": mixed_dtypes,
    "yes_or_no": lambda: objects(
        nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), (numbers()[0], numbers(classes=2)[1].float()),
        loss=nn.BCEWithLogitsLoss(),
    ),
    "mapping_of_inputs": mapping_of_inputs,
    "augmented_data": lambda: objects(mlp(), Rows(augmented), augmentations=2),
    "correlated_noise": lambda: objects(
        mlp(), method=methods.memf(**{**AT, "noise_multiplier": 4.0}), sampling="fixed-order"
    ),
    "users_of_two_examples": lambda: objects(mlp(), sampling=users()),
    "adam_with_groups": adam_with_groups,
}  # fmt: skip
