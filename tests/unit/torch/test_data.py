"""What goes into a run: kinds of data, refused arguments and models, and what epsilon it ends with."""

import logging
import random
import re
import traceback
import warnings
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
)

import dpcore
import dpcore.torch
from dpcore.errors import ArgumentError, ArgumentTypeError, BackendError, DpcoreError, PrivacyError
from dpcore.sampling import FixedOrderSampler, PoissonSampler, UserSampler, shard
from dpcore.torch.data.data import Data
from dpcore.torch.data.overlap import identities
from dpcore.torch.make_private import check_labels
from dpcore.torch.model.state_probe import Snapshot
from tests.refused import refused
from tests.unit.torch.models import Called, Rows
from tests.unit.torch_runs import DATA, KEY, METHODS, finish, load, model, saved, sgd, start, values


def test_every_kind_of_data_gives_the_same_run() -> None:
    read_only = DATA[0].numpy().copy()
    read_only.flags.writeable = False
    kinds = (DATA, TensorDataset(*DATA), Rows(), tuple(t.numpy() for t in DATA), (read_only, DATA[1]))
    kinds = (*kinds, ({"input": DATA[0]}, DATA[1]), list(zip(*DATA, strict=True)))
    ends = [finish(start(model(), data=data), stop=3) for data in kinds]
    assert all(torch.equal(end, ends[0]) for end in ends[1:])


def joined(change: Any) -> Any:
    """A collate function that changes the inputs of the examples that it joins."""

    def collate(rows: list[Any]) -> Any:
        inputs, targets = default_collate(rows)
        return change(inputs), targets

    return collate


class AllAtOnce(Rows):
    def __getitems__(self, places: list[int]) -> list[Any]:
        rows = [self[place] for place in places]
        mean = sum(inputs for inputs, _ in rows) / len(rows)
        return [(inputs - mean, target) for inputs, target in rows]


def test_no_way_of_reading_a_data_set_mixes_the_examples_of_a_batch() -> None:
    def end(data: Rows, **options: Any) -> torch.Tensor:
        return finish(start(model(), data=data, **options), stop=3)

    centered = end(Rows(), collate_fn=joined(lambda inputs: inputs - inputs.mean(0) / 2))
    assert torch.equal(centered, end(Rows(), collate_fn=joined(lambda inputs: inputs / 2)))
    assert torch.equal(end(AllAtOnce()), end(Rows()))


# Random by torch where an example is read, and again where the examples are joined.
AUGMENTED = {
    "data": Rows(lambda index, x, y: (x + torch.rand(5), y)),
    "collate_fn": joined(lambda inputs: inputs + 10 * torch.rand_like(inputs)),
}


def drawn(seed: int, key: bytes = KEY, fork: bool | None = None) -> list[torch.Tensor]:
    def fresh() -> dpcore.torch.PrivateRun:
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        run = start(net, **AUGMENTED, key=key, sampling="fixed_order", steps=3, epochs=None)
        assert torch.equal(torch.get_rng_state(), state)
        return run

    net = model()
    run = fresh()
    if fork is not None:
        run = load(fresh(), saved(run), fork)
    before = torch.get_rng_state()
    result = []
    for batch in run.loader:
        result.append(batch[0])
        run.step(batch)
    assert torch.equal(torch.get_rng_state(), before)  # it would tell how many examples were drawn
    assert any("augmentation" in caveat for caveat in run.statement().caveats)
    return result


def test_augmentation_follows_from_the_secret_key_alone() -> None:
    batches = drawn(1)
    assert all(torch.equal(a, b) for a, b in zip(batches, drawn(2), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(batches, drawn(1, fork=False), strict=True))
    assert not torch.equal(batches[0] - DATA[0][0], drawn(1, bytes(32))[0] - DATA[0][0])
    assert not torch.equal(batches[0], drawn(1, fork=True)[0])


OWN = {
    "torch": (lambda: torch.Generator().manual_seed(7), lambda own: torch.rand(5, generator=own)),
    "numpy": (lambda: np.random.default_rng(7), lambda own: torch.from_numpy(own.random(5))),
    "numpy, old": (lambda: np.random.RandomState(7), lambda own: torch.from_numpy(own.random_sample(5))),
    "python": (lambda: random.Random(7), lambda own: torch.tensor([own.random() for _ in range(5)])),
    "numpy's global": (lambda: None, lambda own: torch.from_numpy(np.random.rand(5))),  # noqa: NPY002
    "python's global": (lambda: None, lambda own: torch.tensor([random.random() for _ in range(5)])),
}


class Noisy(Rows):
    """Augmented by a transform with a generator of its own, or by the collate function."""

    def __init__(self, kind: str, collates: bool, lazily: bool) -> None:
        super().__init__(lambda index, x, y: (x if collates else x + self.drawn(), y))
        self.make, self.draw = OWN[kind]
        self.own = None if lazily else self.make()

    def drawn(self) -> torch.Tensor:
        if self.own is None:
            self.own = self.make()
        return self.draw(self.own).to(torch.float32)


@pytest.mark.parametrize(
    ("kind", "collates", "lazily"),
    [(kind, collates, kind in ("torch", "numpy")) for kind, collates in zip(OWN, 3 * [True, False], strict=True)],
)
def test_draws_of_the_data_sets_own_generators_follow_from_the_key(kind: str, collates: bool, lazily: bool) -> None:
    """Of a known seed, an example less would give all later ones other draws: the sum moved by 7.95 C."""

    def batch(key: bytes, used: int) -> torch.Tensor:
        data = Noisy(kind, collates, lazily)
        collate = joined(lambda inputs: torch.stack([row + data.drawn() for row in inputs]))
        for _ in range(used):
            data.drawn()
        users = {"own": data.own, "python": random._inst, "numpy": np.random.mtrand._rand}  # type: ignore[attr-defined]
        before = Snapshot(users)
        options = {"sampling": "fixed_order", "gradients": "one-by-one"}  # which spares the proof
        run = start(model(), data=data, collate_fn=collate if collates else None, key=key, **options)
        inputs, _ = next(iter(run.loader))
        assert used == 0 or not before.changed(Snapshot(users))
        return inputs

    drawn = batch(KEY, 0)
    assert not torch.equal(drawn, DATA[0][: len(drawn)])
    assert torch.equal(drawn, batch(KEY, 3))
    assert not torch.equal(drawn, batch(bytes(32), 0))


class Shifted(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + 10, target


def test_a_subclass_of_tensor_dataset_keeps_its_own_getitem() -> None:
    run = start(model(), data=Shifted(*DATA))
    assert (next(iter(run.loader))[0] >= 10).all()


def padded(rows: list[Any]) -> Any:
    inputs = nn.utils.rnn.pad_sequence([inputs for inputs, _ in rows], batch_first=True)
    return inputs, torch.tensor([target for _, target in rows])


@pytest.mark.parametrize(("collate_fn", "words"), [(padded, "fixed length"), (None, "failed to join")])
def test_padding_to_the_longest_is_refused_without_telling_sizes(collate_fn: Any, words: str) -> None:
    ragged = Rows(lambda index, x, y: (x.repeat(1 + (index == 7), 1).flatten(), y))
    net = Called(lambda m, x: m.layer(x.mean(1, keepdim=True).expand(-1, 5)), layer=nn.Linear(5, 3))
    run = start(net, data=ragged, collate_fn=collate_fn, sampling="fixed_order")
    with pytest.raises(ArgumentError, match=words) as caught:
        finish(run)
    told = re.sub(r"\w+\.py, line \d+", "", str(caught.value)).replace("example 0", "")
    assert not any(digit in told for digit in "0123456789")


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


class Lengthless(Rows):
    def __len__(self) -> int:
        raise TypeError("no length")


# fmt: off
ARGUMENTS_REFUSED = {
    "a mapping of names": (lambda: {"data": {"train": Rows()}}, r"data\['train'\]=Rows: must be a tensor or an array"),
    "a tuple of lists": (lambda: {"data": (DATA[0].tolist(), [0] * 30)}, r"data\[0\]\[0\]\[0\]=float: must be a"),
    "words": (lambda: {"data": (np.array(["a", "b"]), DATA[1])}, r"data\[0\] of dtype <U1: must be numbers"),
    "rows in reverse": (lambda: {"data": (DATA[0].numpy()[::-1], DATA[1])}, r"data\[0\] of dtype float32: must be"),
    "examples by name": (
        lambda: {"data": {str(i): (torch.ones(4), torch.tensor(0)) for i in range(30)}},
        r"first dimensions \[4, None\]: every tensor must have",
    ),
    "a list of columns": (lambda: {"data": list(DATA)}, "data=a list of 2 tensors: must be a tuple"),
    "nested lists": (lambda: {"data": [DATA[0].tolist(), DATA[1].tolist()]}, "lists of numbers as its examples"),
    "no length": (lambda: {"data": Lengthless()}, "must be a number of examples"),
    "torch's sampler": (lambda: {"sampling": RandomSampler(Rows())}, "what torch's samplers draw is not accounted"),
    "a shard": (lambda: {"sampling": shard(PoissonSampler(dataset_size=30, batch_size=8), 0, 2)}, "must be a name"),
    "a class": (lambda: {"sampling": PoissonSampler}, "must be a name"),
    "nothing": (lambda: {"sampling": None}, "sampling=None: must be a name"),
    "loader": (lambda: {"data": DataLoader(TensorDataset(*DATA))}, "loader.dataset"),
    "iterable": (lambda: {"data": Stream()}, "map-style"),
    "lengths": (lambda: {"data": (DATA[0], DATA[1][:-1])}, "30, 29"),
    "no data": (lambda: {"data": (DATA[0][:0], DATA[1][:0])}, "0 examples"),
    "collate with tensors": (lambda: {"data": DATA, "collate_fn": default_collate}, "collate_fn with tensors"),
    "collate with an array": (lambda: {"data": DATA[0].numpy(), "collate_fn": default_collate}, "TensorDataset"),
    "unknown accountant": (lambda: {"accountant": "pdl"}, "accountant='pdl'"),
    "accountant of other events": (lambda: {"accountant": "gaussian"}, "accountant='gaussian'"),
    "two rows of one": (lambda: {"data": Rows(), "collate_fn": lambda _: (DATA[0][:2], DATA[1][:2])}, "keep it as one"),
    "no noise": (lambda: {"method": sgd(noise_multiplier=None)}, "target_epsilon"),
    "both": (lambda: {"target_epsilon": 3.0}, "already has noise_multiplier"),
    "no delta": (
        lambda: {"method": sgd(noise_multiplier=None), "target_epsilon": 3.0, "target_delta": None},
        "target_delta=None"),
    "delta": (lambda: {"target_delta": 1.0}, "target_delta=1.0"),
    "epsilon": (lambda: {"method": sgd(noise_multiplier=None), "target_epsilon": -3.0}, "target_epsilon=-3.0"),
    "no batch size": (lambda: {"method": sgd(batch_size=None)}, "batch_size=None"),
    "batch too large": (lambda: {"method": sgd(batch_size=31)}, "batch_size=31"),
    "sampling": (lambda: {"sampling": "poison"}, "did you mean 'poisson'"),
    "correlated noise": (
        lambda: {"method": METHODS["memf"](8)}, "sampler=PoissonSampler: correlated noise.*sampling='fixed-order'"),
    "independent moments": (
        lambda: {"method": METHODS["adam independent"](8)},
        "sampler=PoissonSampler: independent moments need a hard maximum.*sampling='fixed-order'"),
    "joint moments": (
        lambda: {"method": METHODS["adam joint"](8), "sampling": "fixed_size"},
        "sampler=FixedSizeSampler: joint moments.*sampling='fixed-order'"),
    "joint moments of a cut batch": (
        lambda: {"method": METHODS["adam joint"](8), "sampling": "truncated_poisson"},
        "sampler=TruncatedPoissonSampler: joint moments.*sampling='fixed-order'"),
    "maximum of another sampler": (lambda: {"max_batch_size": 12}, "is only for sampling 'truncated-poisson'"),
    "maximum below the batch size": (
        lambda: {"sampling": "truncated_poisson", "max_batch_size": 7},
        "max_batch_size=7: must be at least the expected batch size 8"),
    "groups of another sampler": (lambda: {"groups": 2}, "groups=2: is only for sampling 'cyclic-poisson'"),
    "no groups": (lambda: {"sampling": "cyclic_poisson"}, "groups=None: must be given with sampling 'cyclic-poisson'"),
    "users of other data": (
        lambda: {"sampling": UserSampler(PoissonSampler(dataset_size=8, batch_size=8), range(8), 1)},
        "user_of_example of length 8: must name the user of each of the 30,"),
    "sampler of other data": (lambda: {"sampling": PoissonSampler(dataset_size=31, batch_size=8)}, "must be 30"),
    "sampler of other batch": (lambda: {"sampling": FixedOrderSampler(dataset_size=30, batch_size=10)}, "batch_size=8"),
    "option of a sampler": (
        lambda: {"sampling": PoissonSampler(dataset_size=30, batch_size=8), "groups": 2},
        "groups=2: is only for a sampling by name"),
    "epochs and steps": (lambda: {"steps": 3}, "exactly one"),
    "epochs": (lambda: {"epochs": 0}, "epochs=0"),
    "memory": (lambda: {"max_memory": "plenty"}, "max_memory='plenty'"),
    "microbatch": (lambda: {"microbatch_size": 0}, "microbatch_size=0"),
    "method": (lambda: {"method": "disk"}, "dpcore.Method")
}
# fmt: on


@pytest.mark.parametrize("name", ARGUMENTS_REFUSED)
def test_arguments_refused(name: str) -> None:
    options, words = ARGUMENTS_REFUSED[name]
    with pytest.raises(DpcoreError, match=words) as caught:
        start(model(), **options())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("delta", "no noise", "no batch size", "batch too large", "sampling", "correlated noise", "epochs", "memory"),
        *("microbatch", "unknown accountant", "no groups", "no ledger", "params"),
    ],
)
def test_arguments_are_refused_before_the_data_are_read_or_the_model_is_tried(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("too early")

    more = {"no ledger": {"ledger": tmp_path / "none"}, "params": {"params": [{"params": [], "strategy": 1}]}}
    options = more[name] if name in more else ARGUMENTS_REFUSED[name][0]()
    data, net = Rows(), model()
    monkeypatch.setattr(Rows, "__getitem__", never)
    monkeypatch.setattr(net, "forward", never)
    with pytest.raises(DpcoreError):
        start(net, data=data, **options)


def test_data_that_shrink_fail_without_telling_who_was_drawn() -> None:
    def shrinking(index: int, x: Any, y: int) -> Any:
        if index > 0:
            raise FileNotFoundError(f"patient-{index}.png")
        return x, y

    run = start(model(), data=Rows(shrinking))
    with pytest.raises(ArgumentError, match="failed to read a step's examples") as caught:
        finish(run)
    assert "FileNotFoundError in test_data.py, line" in str(caught.value)
    assert "patient" not in "".join(traceback.format_exception(caught.value))


def test_values_that_cannot_be_joined_are_in_no_traceback() -> None:
    odd = Rows(lambda index, x, y: (x, y if index == 0 else "diagnosis 1234"))

    def collate(rows: list[Any]) -> Any:
        return default_collate([(row[0], int(row[1])) for row in rows])

    with pytest.raises(ArgumentError, match=r"collate_fn failed .*ValueError in test_data.py, line \d+;") as caught:
        finish(start(model(), data=odd, collate_fn=collate))
    assert "1234" not in "".join(traceback.format_exception(caught.value))


def test_float64_of_other_libraries_is_told_what_to_say() -> None:
    doubles = (DATA[0].double().numpy(), DATA[1].numpy())
    words = r"data: inputs of float64 for a model of float32: say \.astype\('float32'\)"
    refused(ArgumentTypeError, words, start, model(), data=doubles)
    words = r"inputs\['input'\] of float64 for a model of bfloat16: say \.to\(torch\.bfloat16\)"
    refused(ArgumentTypeError, words, start, model().bfloat16(), data=({"input": doubles[0]}, DATA[1]))

    finish(start(Called(lambda m, x: m.net(x.float()), net=model()), data=doubles), stop=1)


@pytest.mark.parametrize("kind", ["DataFrame", "Series"])
def test_tables_of_pandas_are_told_how_to_convert(kind: str) -> None:
    table = type(kind, (UserDict,), {"__module__": "pandas.core.frame"})({"age": DATA[0][:, 0]})
    for data, name in ((table, "data"), ((table, DATA[1]), r"data\[0\]"), ({"x": table}, r"data\['x'\]")):
        words = rf'^{name}={kind}: .*df\.to_numpy\(dtype="float32"\)'
        refused(ArgumentTypeError, words, start, model(), data=data)


def test_no_error_of_a_collate_function_is_shown() -> None:
    def collate(rows: list[Any]) -> Any:
        raise OSError("cannot identify image file 'patient_7.png'")

    with pytest.raises(ArgumentError, match=r"collate_fn failed .*OSError") as caught:
        start(model(), data=Rows(), collate_fn=collate)
    assert "patient" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_labels_that_are_no_classes_are_refused_and_not_shown() -> None:
    check_labels(torch.tensor([[0, 2], [-100, 1]]), 3)
    check_labels(torch.tensor([0.5, 7.0]), 3)
    check_labels(torch.tensor([0, 255], dtype=torch.uint8), 3, ignore_index=255)
    with pytest.raises(ArgumentError, match="labels"):
        check_labels(torch.tensor([0, 156], dtype=torch.uint8), 3)  # -100 in uint8
    for wrong in (3, -1, 7777):
        with pytest.raises(ArgumentError, match=r"^labels: must lie in \[0, 3\).*ignore_index=-100") as caught:
            check_labels(torch.tensor([0, 1, wrong]), 3)
        assert "7777" not in str(caught.value)


def test_models_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"torch\.nn\.Module"):
        start(lambda x: x)  # type: ignore[arg-type]
    mixed = model()
    mixed[0].double()
    with pytest.raises(DpcoreError):
        start(mixed)
    with pytest.raises(ArgumentError, match="made up in the data"):
        start(nn.Linear(6, 3))


def test_changes_of_the_model_after_make_private_are_refused() -> None:
    def stepped(change: Any) -> None:
        net = model()
        run = start(net)
        batch = next(iter(run.loader))
        change(net)
        run.step(batch)

    for change, words in (
        (lambda net: net.__setitem__(2, nn.Linear(7, 3)), r"'2\.weight' was replaced, removed or frozen"),
        (lambda net: net[0].requires_grad_(False), r"'0\.weight' was replaced, removed or frozen"),
        (lambda net: net.append(nn.Linear(3, 3)), r"'3\.weight' was added"),
        (lambda net: net.double(), "changed from"),
    ):
        with pytest.raises(ArgumentError, match=words):
            stepped(change)


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_model_takes_no_step_and_goes_on_when_it_is_cast_back(cast: torch.dtype) -> None:
    net, straight = model(), model()
    run, other = start(net), start(straight)
    batch, same = next(iter(run.loader)), next(iter(other.loader))
    kept = [p.detach().clone() for p in net.parameters()]
    net.to(cast)
    words = f"parameter '0.weight' changed from .7, 5. float32 on cpu to .7, 5. {str(cast)[6:]} on cpu"
    refused(ArgumentError, words, lambda: run.step(batch))
    assert run.steps_taken == 0
    net.float()
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), kept, strict=True):
            parameter.copy_(value)
    run.step(batch)
    other.step(same)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), straight.parameters(), strict=True))


def test_a_frozen_batchnorm_must_stay_frozen() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval().requires_grad_(False), nn.Linear(4, 3))
    run = start(net)
    batch = next(iter(run.loader))
    statistics = net[1].running_mean.clone()
    run.step(batch)
    assert torch.equal(net[1].running_mean, statistics)
    net.train()
    with pytest.raises(ArgumentError, match=r"'1' \(BatchNorm1d\) was frozen"):
        run.step(next(iter(run.loader)))


def test_a_cuda_model_under_numpy_names_set_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the meta device stands in: any device but the CPU takes the same branch."""
    with pytest.raises(BackendError, match=r'dpcore\.set_backend\("triton"\)'):
        start(model().to("meta"))
    from dpcore.torch import parameter_views as working

    class Triton:
        name, arrays = "triton", "torch"

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        working.check_place(Triton(), model())  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendError, match=r"float64 .*model\.float\(\)"):
        working.check_place(Triton(), model().double())  # type: ignore[arg-type]
    working.check_place(Triton(), model().double().float())  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", ["poisson", "fixed_order"])
def test_epsilon_is_the_statements_under_every_sampler(sampling: str) -> None:
    run = start(model(), sgd(noise_multiplier=None), sampling=sampling, target_epsilon=4.0)
    spent = [run.epsilon()]
    for stop in (1, 5, 12):
        finish(run, stop=stop)
        statement = run.statement()
        spent.append(statement.best_epsilon)
        assert run.epsilon() == statement.best_epsilon
        assert statement.epsilon == {name: run.epsilon(accountant=name) for name in statement.epsilon}
    assert spent[0] == 0 < spent[1] <= spent[2] < spent[3] <= 4.0 or sampling == "fixed_order"
    assert run.epsilon() <= 4.0
    assert run.epsilon() == pytest.approx(4.0, rel=1e-2)
    assert run.statement(1e-6).best_epsilon > 4.0


def test_without_a_target_delta_one_must_be_asked_for() -> None:
    run = start(model(), target_delta=None)
    with pytest.raises(ArgumentError, match="delta=None"):
        run.statement()
    assert run.statement(1e-5).delta == 1e-5


@pytest.mark.parametrize(("rows", "options"), [(5, {}), (40, {"collate_fn": torch.stack})])
def test_a_list_of_tensors_is_a_list_of_examples(rows: int, options: dict[str, Any]) -> None:
    source = Data(list(torch.zeros(30, rows)), torch.device("cpu"), **options)
    assert (source.length, source.template().shape) == (30, (1, rows))


@pytest.mark.parametrize(("name", "data"), [("dp_sgd", DATA), ("disk", Rows())], ids=["tensors", "dataset"])
def test_batches_of_one_and_of_none(name: str, data: Any) -> None:
    """A batch of one is one clipped vector; a step on none is the noise of the step alone."""
    one = start(model(), METHODS[name](1), data=data, sampling="fixed_order", steps=3, epochs=None)
    assert [len(batch[0]) for batch in one.loader if one.step(batch) is None] == [1, 1, 1]
    assert values(one.model).isfinite().all()

    def empty(value: float) -> torch.Tensor:
        inputs = torch.full_like(DATA[0], value)
        few = (inputs, DATA[1]) if data is DATA else [(row, 0) for row in inputs]
        run = start(model(), METHODS[name](1e-6), data=few, steps=2, epochs=None)
        return finish(run)

    assert torch.equal(empty(1.0), empty(2.0))  # of the data nothing is in it
    assert not torch.equal(empty(1.0), values(model()))


class WebStream(IterableDataset[Any]):
    """As webdataset has them."""

    def __iter__(self) -> Iterator[Any]:
        return zip(*DATA, strict=True)


class Shards:
    """A stream of no known base, with a length that somebody gave it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(WebStream())

    def __len__(self) -> int:
        return 30


@pytest.mark.parametrize("stream", [WebStream(), Shards(), iter([DATA])])
def test_streams_are_refused_with_the_reason(stream: Any) -> None:
    words = rf"^data={type(stream).__name__}: must be a map-style dataset .*; a stream gives its examples in an order"
    refused(ArgumentTypeError, words, start, model(), data=stream)


@pytest.mark.parametrize("sampling", ["fixed_size", "fixed_order", "shuffled"])
def test_a_batch_that_was_kept_is_not_stepped_again(sampling: str) -> None:
    run = start(model(), sampling=sampling, steps=3, epochs=None)
    batches = iter(run.loader)
    inputs, targets = next(batches)
    run.step((inputs * 1.0, targets.view(-1)))  # one tensor in the drawn memory is enough
    new, _ = next(batches)
    for kept in ((inputs, targets), (inputs * 1.0, targets), (new * 1.0, targets * 1)):
        refused(PrivacyError, "none of the drawn tensors", run.step, kept)
    run.step((new, targets))
    assert run.steps_taken == 2


class Warns(Rows):
    def __getitem__(self, place: int) -> Any:
        warnings.warn(f"the image of place {place} is odd", UserWarning, stacklevel=1)
        logging.getLogger("dataset").error("the text of place %d is odd", place)
        return super().__getitem__(place)


def test_no_warning_or_log_shows_which_example_was_drawn(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        finish(start(model(), data=Warns()))
        assert not [warning for warning in shown if "odd" in str(warning.message)]
        assert caplog.text == capfd.readouterr().err == ""
        Warns()[0]  # outside of a run it is shown
    assert "the image of place 0 is odd" in str(shown[-1].message)
    assert "the text of place 0 is odd" in caplog.text


TWICE = Rows()
ONES = [(x, int(y)) for x, y in zip(*DATA, strict=True)]


@pytest.mark.parametrize(
    ("data", "places"),
    [
        (Subset(Rows(), [*range(29), 7]), "7 and 29"),
        (Subset(Subset(Rows(), [3, 4, 3]), [0, 1, 2]), "0 and 2"),
        (Subset(TensorDataset(*DATA), [0, 1, -30]), "0 and 2"),
        (ConcatDataset([Rows(), TWICE, TWICE]), "30 and 60"),
        ([*ONES[:29], ONES[5]], "5 and 29"),
    ],
    ids=["subset", "of a subset", "from the end", "concatenated", "list"],
)
def test_an_example_at_several_places_is_refused_unless_they_are_one_users(data: Any, places: str) -> None:
    net, method = model(), sgd(batch_size=2)
    refused(ArgumentError, f"places {places} are the same example", start, net, method, data=data)
    _, users = np.unique(identities(data), axis=0, return_inverse=True)
    users = users.reshape(-1)
    sampler = UserSampler(PoissonSampler(dataset_size=int(users.max()) + 1, batch_size=2), users, 3)
    assert finish(start(net, method, data=data, sampling=sampler), stop=1).isfinite().all()


def test_a_subset_with_an_index_that_its_data_have_not_is_refused() -> None:
    refused(ArgumentError, "must be below 30", start, model(), data=Subset(Rows(), [*range(29), 30]))
    mask = np.arange(30) < 2  # it would name the places 0 and 1
    words = r"must be integers, not bool; of a mask, give np\.flatnonzero"
    refused(ArgumentTypeError, words, start, model(), data=Subset(Rows(), mask))
