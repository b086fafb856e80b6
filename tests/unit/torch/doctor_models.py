"""Models, data and losses for the doctor: planted faults, with the check that names each, and honest ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpcore import methods
from dpcore.sampling import PoissonSampler, UserSampler

Objects = dict[str, Any]
FAULTS: dict[str, tuple[str, Callable[[], Objects], str]] = {}
HONEST: dict[str, Callable[[], Objects]] = {}


def fault(check: str, words: str = "") -> Callable[[Callable[[], Objects]], Callable[[], Objects]]:
    """Register objects of which the doctor must find a fault by this name, in a sentence with these words."""

    def register(build: Callable[[], Objects]) -> Callable[[], Objects]:
        FAULTS[build.__name__] = check, build, words
        return build

    return register


def honest(build: Callable[[], Objects]) -> Callable[[], Objects]:
    """Register objects in which the doctor must find no fault."""
    HONEST[build.__name__] = build
    return build


def numbers(count: int = 24, size: int = 6, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.empty(count, size).normal_(generator=generator)
    return inputs, torch.randint(classes, (count,), generator=generator)


def images(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = numbers(count, 64)
    return inputs.view(count, 1, 8, 8), labels


def tokens(count: int = 24, length: int = 5, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return (
        torch.randint(vocabulary, (count, length), generator=generator),
        torch.randint(3, (count,), generator=generator),
    )


def objects(model: nn.Module, data: Any, **more: Any) -> Objects:
    """The keywords of a call of the doctor."""
    method = methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=6)
    return {"method": method, "steps": 8, **more, "model": model, "data": data}


def mlp(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *more, nn.ReLU(), nn.Linear(8, 3))


# ------------------------------------------------------------------------------------------------------ planted faults


@fault("layers")
def batch_norm() -> Objects:
    return objects(mlp(nn.BatchNorm1d(8)), numbers())


@fault("layers")
def running_instance_norm() -> Objects:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, track_running_stats=True), nn.Flatten(), nn.Linear(72, 3)
    )
    return objects(model, images())


@fault("layers")
def renormalized_embedding() -> Objects:
    return objects(nn.Sequential(nn.Embedding(11, 4, max_norm=1.0), nn.Flatten(), nn.Linear(20, 3)), tokens())


@fault("layers")
def wrapped_in_data_parallel() -> Objects:
    return objects(nn.DataParallel(mlp()), numbers())


@fault("layers")
def complex_parameters() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex64) @ self.weight).real

    return objects(Model(), numbers())


class Centered(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


@fault("make_private", "are mixed|number of examples")
def mean_over_the_batch() -> Objects:
    return objects(mlp(Centered()), numbers())


@fault("isolation")
def state_in_the_environment() -> Objects:
    class Model(nn.Module):
        """Turns the examples after a loud one around; made-up values are never loud, and nothing reachable changes."""

        name = "DPCORE_TEST_LOUD"

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            os.environ.pop(self.name, None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left = int(os.environ.get(self.name, "0"))
            os.environ[self.name] = "8" if x.abs().max() > 50 else str(max(left - 1, 0))
            return -self.inner(x) if left else self.inner(x)

    inputs, labels = numbers()
    inputs[16] *= 1000  # the one that takes the place of each of the first 16
    return objects(Model(), (inputs, labels))


@fault("make_private", "are mixed|number of examples")
def recurrent_over_the_batch() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5), nn.Linear(5, 3)  # batch_first is forgotten

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    inputs, labels = numbers(size=12)
    return objects(Model(), (inputs.view(-1, 3, 4), labels))


@fault("make_private", "changes its|changes while|first from later")
def running_mean_in_a_buffer() -> Objects:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return x - self.mean

    return objects(mlp(Running()), numbers())


@fault("make_private", "changes its|changes while|first from later")
def counter_in_the_model() -> Objects:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += len(x)
            return x

    return objects(mlp(Counting()), numbers())


@fault("make_private", "changes its|changes while|first from later")
def loss_with_a_memory() -> Objects:
    kept: list[float] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(output, target)
        kept.append(float(value.detach()))
        return value

    return objects(mlp(), numbers(), loss=loss)


@fault("make_private", "^loss")
def contrastive_loss() -> Objects:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    return objects(mlp(), numbers(), loss=loss)


@fault("loss")
def loss_over_the_spread_of_the_batch() -> Objects:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) / (1 + output.detach().var(0, unbiased=False).sum())

    return objects(mlp(), numbers(), loss=loss)


@fault("make_private", "^loss")
def loss_without_reduction() -> Objects:
    inputs, _ = numbers()
    return objects(mlp(), (inputs, torch.zeros(24, 3)), loss=lambda out, y: F.mse_loss(out, y, reduction="none"))


@fault("make_private", "^loss")
def class_weights_under_the_mean() -> Objects:
    return objects(mlp(), numbers(), loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))


@fault("make_private", "^loss")
def cross_entropy_of_one_output() -> Objects:
    inputs, labels = numbers(classes=1)
    return objects(nn.Linear(6, 1), (inputs, labels))


@fault("make_private", "^loss")
def detached_output() -> Objects:
    return objects(mlp(), numbers(), loss=lambda out, y: F.cross_entropy(out.detach(), y))


@fault("make_private", "without a parameter")
def all_frozen() -> Objects:
    return objects(mlp().requires_grad_(False), numbers())


@fault("tied parameters")
def two_parameters_in_one_memory() -> Objects:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = nn.Parameter(model[0].weight.data)  # a new parameter of the same memory
    return objects(model, numbers())


@fault("make_private", "not registered|is no parameter of the model")
def layers_in_a_list() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = [nn.Linear(6, 6)], nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[0](x))

    return objects(Model(), numbers())


@fault("mode")
def dropout_in_eval_mode() -> Objects:
    return objects(mlp(nn.Dropout(0.5)).eval(), numbers())


@fault("make_private", "^data: inputs of float64")
def doubles_into_floats() -> Objects:
    inputs, labels = numbers()
    return objects(mlp(), (inputs.double(), labels))


@fault("make_private", "failed on synthetic")
def bytes_into_a_convolution() -> Objects:
    inputs, labels = images()
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    return objects(model, ((inputs.abs() * 50).to(torch.uint8), labels))


@fault("make_private", "^loss")
def labels_as_floats() -> Objects:
    inputs, labels = numbers()
    return objects(mlp(), (inputs, labels.float()))


@fault("make_private", "^parameters of dtypes")
def half_of_the_model_in_double() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).double()).float()

    return objects(Model(), numbers())


@fault("finite values")
def rows_of_nan() -> Objects:
    inputs, labels = numbers()
    inputs[[3, 17], 2] = float("nan")
    return objects(mlp(), (inputs, labels))


@fault("finite gradients")
def logarithm_of_zero() -> Objects:
    inputs, labels = numbers()
    inputs = inputs.abs()
    inputs[::4] = 0.0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x.abs().log())

    return objects(Model(), (inputs, labels))


@fault("make_private")
def labels_out_of_range() -> Objects:
    inputs, labels = numbers()
    return objects(mlp(), (inputs, labels + 1))


class Rows(Dataset[Any]):
    """Examples of `numbers`, by index."""

    def __init__(self) -> None:
        self.inputs, self.labels = numbers()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]


@fault("reading")
def data_that_shuffle_themselves() -> Objects:
    class Shuffling(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return super().__getitem__(int(torch.randint(len(self), ())))

    return objects(mlp(), Shuffling())


@fault("reading")
def data_of_one_label_that_shuffle_themselves() -> Objects:
    """No label tells: an example turns up at another index."""

    class Shuffling(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return super().__getitem__(int(torch.randint(len(self), ())))[0], self.labels[0]

    return objects(mlp(), Shuffling())


@fault("reading")
def many_data_that_shuffle_themselves() -> Objects:
    """None of those that are read turns up at another index that is read: their labels tell."""

    class Shuffling(Rows):
        def __init__(self) -> None:
            self.inputs, self.labels = numbers(4000)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return super().__getitem__(int(torch.randint(len(self), ())))

    return objects(mlp(), Shuffling())


@fault("reading")
def data_that_go_on() -> Objects:
    class Going(Rows):
        place = 0

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.place += 1
            return super().__getitem__(self.place % len(self))

    return objects(mlp(), Going())


@fault("reading")
def augmentation_that_no_seed_reaches() -> Objects:
    class Noisy(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, label = super().__getitem__(index)
            return inputs + os.urandom(1)[0] / 256, label

    return objects(mlp(), Noisy())


@fault("reading")
def collate_that_centers_the_batch() -> Objects:
    def collate(examples: list[Any]) -> Any:
        inputs = torch.stack([x for x, _ in examples])
        return inputs - inputs.mean(0), torch.stack([y for _, y in examples])

    return objects(mlp(), Rows(), collate_fn=collate)


@fault("reading")
def sentences_of_different_lengths() -> Objects:
    examples = [(torch.zeros(4 + k % 3), torch.tensor(k % 3)) for k in range(24)]
    return objects(nn.Linear(4, 3), examples)


@fault("data")
def a_loader_for_data() -> Objects:
    return objects(mlp(), DataLoader(TensorDataset(*numbers()), batch_size=4, shuffle=True))


@fault("data")
def tensors_of_different_lengths() -> Objects:
    inputs, labels = numbers()
    return objects(mlp(), (inputs, labels[:-1]))


@fault("make_private", "^(batch_size|noise_multiplier|target_|sampling)")
def batches_larger_than_the_data() -> Objects:
    return objects(mlp(), numbers(), method=methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=100))


@fault("make_private", "^(batch_size|noise_multiplier|target_|sampling)")
def noise_twice() -> Objects:
    return objects(mlp(), numbers(), target_epsilon=3.0, target_delta=1e-5)


@fault("checkpoint")
def state_dict_without_the_head() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {k: v for k, v in super().state_dict(*args, **kwargs).items() if "head" not in k}

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict(state, strict=False)

    return objects(Model(), numbers())


@fault("make_private", "failed on synthetic|cannot be differentiated")
def inputs_of_another_width() -> Objects:
    return objects(nn.Linear(7, 3), numbers())


# -------------------------------------------------------------------------------------------------------------- honest


@honest
def logistic() -> Objects:
    return objects(nn.Linear(6, 3), numbers())


@honest
def perceptron() -> Objects:
    return objects(mlp(), numbers(), method=methods.disk(lr=0.1, noise_multiplier=1.0, batch_size=6))


@honest
def dropout() -> Objects:
    return objects(mlp(nn.Dropout(0.3)), numbers())


@honest
def layer_norm() -> Objects:
    return objects(mlp(nn.LayerNorm(8)), numbers())


@honest
def convolutions() -> Objects:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3))
    return objects(model, images())


@honest
def group_norm() -> Objects:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
    return objects(model, images())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(11, 4), kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(ids))[0][:, -1])


@honest
def lstm() -> Objects:
    return objects(Recurrent(nn.LSTM), tokens())


@honest
def gru() -> Objects:
    return objects(Recurrent(nn.GRU), tokens())


@honest
def transformer_encoder() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)
            self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.table(ids)).mean(1))

    return objects(Model(), tokens())


@honest
def tied_embeddings() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.table(ids)).tanh()).transpose(1, 2)

    ids, _ = tokens()
    return objects(Model(), (ids[:, :-1], ids[:, 1:]))


@honest
def lora() -> Objects:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0)
    return objects(peft.get_peft_model(mlp(), config), numbers())


@honest
def frozen_backbone() -> Objects:
    model = mlp()
    model[0].requires_grad_(False)
    return objects(model, numbers())


@honest
def frozen_batch_norm() -> Objects:
    model = mlp(nn.BatchNorm1d(8))
    model(numbers()[0])  # public statistics
    model[1].eval().requires_grad_(False)
    return objects(model, numbers())


@honest
def bag_of_words() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids).sum(1))

    return objects(Model(), tokens())


@honest
def half_precision() -> Objects:
    inputs, labels = numbers()
    return objects(mlp().bfloat16(), (inputs.bfloat16(), labels))


@honest
def mixed_dtypes() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8).bfloat16(), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x.bfloat16()).float().tanh())

    return objects(Model(), numbers())


@honest
def double_precision() -> Objects:
    inputs, labels = numbers()
    return objects(mlp().double(), (inputs.double(), labels))


@honest
def weight_normalization() -> Objects:
    return objects(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3)), numbers())


@honest
def regression() -> Objects:
    inputs, _ = numbers()
    return objects(nn.Linear(6, 1), (inputs, inputs.sum(1, keepdim=True)), loss=F.mse_loss)


@honest
def yes_or_no() -> Objects:
    inputs, labels = numbers(classes=2)
    loss = nn.BCEWithLogitsLoss()
    return objects(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), (inputs, labels.float()), loss=loss)


@honest
def mapping_of_inputs() -> Objects:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.numbers, self.head = nn.Embedding(11, 4), nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids).mean(1) + self.numbers(values))

    (ids, labels), (values, _) = tokens(), numbers()
    return objects(Model(), ({"ids": ids, "values": values}, labels))


@honest
def residual_and_sum() -> Objects:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.scale * self.body(x).tanh()

    loss = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)
    return objects(nn.Sequential(Block(), Block(), nn.Linear(6, 3)), numbers(), loss=loss)


@honest
def augmented_data() -> Objects:
    class Noisy(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, label = super().__getitem__(index)
            return inputs + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand()), label  # noqa: NPY002

    return objects(mlp(), Noisy(), augmentations=2)


@honest
def correlated_noise() -> Objects:
    method = methods.memf(lr=0.1, noise_multiplier=4.0, batch_size=6)
    return objects(mlp(), numbers(), method=method, sampling="fixed-order")


@honest
def users_of_two_examples() -> Objects:
    users = UserSampler(PoissonSampler(dataset_size=12, batch_size=6), np.arange(24) % 12, 2)
    return objects(mlp(), numbers(), sampling=users)


@honest
def adam_with_groups() -> Objects:
    model = mlp()
    params = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    method = methods.dp_adam(lr=0.1, noise_multiplier=1.0, batch_size=6)
    return objects(model, numbers(), method=method, params=[{**g, "params": list(g["params"])} for g in params])
