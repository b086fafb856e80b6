"""Attacks on a ledger: a row of noise meets one sum only, and whatever left a process is counted."""

from __future__ import annotations

import enum
import functools
import logging
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.ledger.reservations import Reservations
from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.minimize import minimize
from dpcore.methods import dp_adam, dp_sgd, memf
from dpcore.sampling import PoissonSampler
from dpcore.torch.checksum import checksum, row_hashes
from dpcore.torch.describe import digest_of, undescribed
from tests.unit import test_torch_replay
from tests.unit.ledger_tools import begin, full, new
from tests.unit.torch.test_replay import Problem, Run, Sums, augment, clean, forks, go, halve_rate
from tests.unit.torch_runs import DATA, model, saved, start

problem, sums = test_torch_replay.problem, test_torch_replay.sums

Loop = dict[str, Any]


class Counting:
    """A loss that knows how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * (1 + self.calls)


class Weighted:
    """A loss with a number, an array and a tensor that a training loop may change."""

    def __init__(self) -> None:
        self.weight, self.array, self.teacher = 1.0, np.ones(3, np.float32), torch.ones(3)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scaled = output * torch.from_numpy(self.array) * self.teacher
        return F.cross_entropy(scaled, target) * self.weight


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Late(nn.Module):
    """Draws in evaluation mode only, in which no model is tried out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1 if self.training else random.random())


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3))


def lower_weight(run: Run) -> None:
    run._engine.gradient.loss.weight *= 0.5


def lower_array(run: Run) -> None:
    run._engine.gradient.loss.array *= 0.5


def move_teacher(run: Run) -> None:
    run._engine.gradient.loss.teacher.data.mul_(0.5)


def lower_dropout(run: Run) -> None:
    run.model[2].p *= 0.5


def add_hook(run: Run) -> None:
    run.model[0].register_forward_hook(lambda module, inputs, output: output * 0.5)


def shrink_buffer(run: Run) -> None:
    run.model.scale.data.mul_(0.5)


def add_by_numpy(batch: Any) -> Any:
    batch[0].numpy()[:] += np.random.default_rng().normal(size=batch[0].shape).astype(np.float32)
    return batch


def swap_labels(batch: Any) -> Any:
    labels = batch[1].numpy()
    labels[:] = labels[::-1].copy()
    return batch


def drawing(draw: Callable[[], float]) -> Any:
    return lambda output, target: F.cross_entropy(output, target) * (1 + draw())


CHANGES: dict[str, tuple[Callable[[], dict[str, Any]], Loop]] = {
    "a loss that counts": (lambda: {"loss": Counting()}, {}),
    "a number of the loss": (lambda: {"loss": Weighted()}, {"after": lower_weight}),
    "an array of the loss": (lambda: {"loss": Weighted()}, {"after": lower_array}),
    "a teacher, by data": (lambda: {"loss": Weighted()}, {"after": move_teacher}),
    "the share of dropout": (lambda: {"net": dropping()}, {"after": lower_dropout}),
    "a hook": (dict, {"after": add_hook}),
    "a buffer, by data": (lambda: {"net": Buffered()}, {"after": shrink_buffer}),
    "Python draws": (lambda: {"loss": drawing(random.random)}, {}),
    "Python draws, hidden": (lambda: {"loss": drawing(lambda: random.random())}, {}),  # noqa: PLW0108
    "NumPy draws": (lambda: {"loss": drawing(lambda: np.random.rand())}, {}),  # noqa: NPY002, PLW0108
    "a batch, by NumPy": (dict, {"change": add_by_numpy}),
    "labels that change places": (dict, {"change": swap_labels}),
}


def attacked(problem: Problem, options: Callable[[], dict[str, Any]], before: Loop, after: Loop) -> Run:
    """Crash and resume; who is refused amid a step goes on with a fork, as the sentence says."""
    state = problem.crashed(problem.run(**options()), **before)
    run = problem.resumed(problem.run(**options()), state)
    try:
        go(run, 6, **after)
    except PrivacyError as refusal:
        assert "the same noise must not be added to another sum" in str(refusal)  # noqa: PT017
        run = problem.run(**options())
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"], fork=True)
        go(run, 6, **after)
    return run


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_row_rests_on_is_compared_row_by_row(problem: Problem, sums: Sums, name: str) -> None:
    options, loop = CHANGES[name]
    run = attacked(problem, options, loop, {})
    assert forks(run) == 1
    assert clean(sums)


def test_draws_that_no_trial_saw(problem: Problem, sums: Sums) -> None:
    run = problem.run(Late())
    run.model.eval()
    state = problem.crashed(run)
    run = problem.run(Late())
    run.model.eval()
    go(problem.resumed(run, state), 6)
    assert forks(run) == 1
    assert clean(sums)


@pytest.mark.parametrize("when", ["before the crash", "after it"])
def test_arrays_that_are_edited_are_not_those_of_the_fingerprint(problem: Problem, sums: Sums, when: str) -> None:
    """Torch does not see what NumPy writes to memory that both have."""
    arrays: list[Any] = []

    def options() -> dict[str, Any]:
        arrays.append(tuple(tensor.numpy().copy() for tensor in DATA))
        return {"data": arrays[-1]}

    def edit(run: Run) -> None:
        arrays[-1][0][:] *= 2

    loops: list[Loop] = [{"after": edit}, {}]
    run = attacked(problem, options, *(loops if when == "before the crash" else loops[::-1]))
    assert forks(run) == 1
    assert clean(sums)


def test_a_schedule_of_the_models_own_is_replayed(problem: Problem, sums: Sums) -> None:
    """What changes in the same way in the same rows is the same sum."""

    def by_step(run: Run) -> None:
        run.model[2].p = 0.5 / (1 + run.steps_taken)

    state = problem.crashed(problem.run(dropping()), after=by_step)
    again = problem.resumed(problem.run(dropping()), state)
    by_step(again)
    go(again, 4, after=by_step)
    assert forks(again) == 0
    assert clean(sums)


@pytest.mark.parametrize("part", ["public", "secret"])
def test_an_edited_checkpoint_is_no_start_of_a_replay(problem: Problem, sums: Sums, part: str) -> None:
    """Its first row would be the same; what edited moments or noise make of the parameters would not."""

    def method() -> Any:
        if part == "public":
            return dp_adam(lr=0.05, noise_multiplier=1.0, batch_size=8)
        return dp_sgd(lr=0.3, noise_multiplier=1.0, batch_size=8)

    state = problem.crashed(problem.run(method=method()))
    if part == "public":
        for tensor in state["optimizer"]["dpcore"]["public"]["arrays"].values():
            tensor.zero_()
    else:
        state["optimizer"]["dpcore"]["secret"]["sampling_key"] = "5a" * 32
    run = problem.resumed(problem.run(method=method()), state)
    go(run, 6)
    assert forks(run) == 1
    assert clean(sums)


def test_rows_after_an_edited_checkpoint_are_no_start_either(problem: Problem, sums: Sums) -> None:
    """They follow for the first time; then the checkpoint is loaded as it was."""
    method = dp_adam(lr=0.05, noise_multiplier=1.0, batch_size=8)
    run = problem.run(method=method)
    go(run, 3)
    state, edited = saved(run), saved(run)
    run.close()
    for tensor in edited["optimizer"]["dpcore"]["public"]["arrays"].values():
        tensor.zero_()
    go(problem.resumed(problem.run(method=method), edited), 3)
    go(problem.resumed(problem.run(method=method), state), 3)
    assert clean(sums)


def test_parameters_that_change_between_the_draw_and_the_first_step(problem: Problem, sums: Sums) -> None:
    state = problem.crashed(problem.run())
    run = problem.resumed(problem.run(), state)

    def halve(batch: Any) -> Any:
        with torch.no_grad():
            run.model[0].weight.mul_(0.5)
        return batch

    with pytest.raises(PrivacyError, match="the same noise must not be added to another sum"):
        go(run, 1, change=halve)
    assert clean(sums)


@pytest.mark.parametrize("switch", ["autocast", "flushed"])
def test_switches_that_round_otherwise(problem: Problem, sums: Sums, switch: str) -> None:
    state = problem.crashed(problem.run())
    run = problem.resumed(problem.run(), state)
    if switch == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            go(run, 4)
    elif torch.set_flush_denormal(True):
        try:
            go(run, 4)
        finally:
            torch.set_flush_denormal(False)
    else:
        pytest.skip("this processor cannot flush denormal numbers")
    assert forks(run) == 1
    assert clean(sums)


def test_a_gpu_must_add_up_in_one_order(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    from dpcore.torch import fingerprint

    run = problem.run()
    engine = run._engine
    arguments = run.plan, engine, engine.gradient.loss, "data", 4
    assert fingerprint.run_digest(*arguments)
    meta = nn.Linear(2, 2, device="meta")  # no sum is taken
    monkeypatch.setattr(engine.gradient, "model", meta)
    assert not fingerprint.run_digest(*arguments)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert not fingerprint.run_digest(*arguments)
        torch.use_deterministic_algorithms(True)
        assert fingerprint.run_digest(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_loading_saving_and_changing(problem: Problem, sums: Sums, seed: int) -> None:
    """Several objects, their checkpoints and branches in turn, refusals included."""
    choose = random.Random(seed)
    options = [{}, {"sampling": "fixed_order", "method": memf(lr=0.3, noise_multiplier=1.0, batch_size=8)}][seed % 2]
    runs, states = [problem.run(**options)], []
    for _ in range(14):
        run = choose.choice(runs)
        act = choose.choice(["step", "step", "save", "load", "load", "begin", "close", "rate", "change", "look"])
        try:
            if act == "step":
                go(run, choose.randint(1, 3))
            elif act == "save":
                states.append(saved(run))
            elif act == "load" and states:
                state = choose.choice(states)
                if choose.random() < 0.8:
                    run.model.load_state_dict(state["model"])
                run.optimizer.load_state_dict(state["optimizer"], fork=choose.choice([None, None, True, False]))
                if choose.random() < 0.3:
                    run.model.load_state_dict(choose.choice(states)["model"])
            elif act == "begin":
                runs.append(problem.run(**options))
                runs[-1].begin()
            elif act == "close":
                run.close()
            elif act == "rate":
                halve_rate(run)
            elif act == "change":
                go(run, 1, change=augment)
            else:
                next(iter(run.loader))
        except PrivacyError:
            continue
    assert clean(sums)
    assert sum(run.releases for run in problem.ledger.runs()) >= len(sums)
    assert problem.ledger.verify().valid


# What a function, an object or a module is


def attribute(weight: float) -> Any:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return output * loss.weight  # type: ignore[attr-defined]

    loss.weight = weight  # type: ignore[attr-defined]
    return loss


class Slotted:
    __slots__ = ("__dict__", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight


class Numbers(dict):  # type: ignore[type-arg]
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight


class Half(float):
    def __mul__(self, other: float) -> float:
        return 0.5 * other


class Third(float):
    def __mul__(self, other: float) -> float:
        return other / 3


def generator(seed: float) -> Any:
    draws = random.Random(seed)
    return lambda output: output * draws.random()


def imports(weight: float) -> Any:
    def loss(output: torch.Tensor) -> torch.Tensor:
        from own_settings import scale  # type: ignore[import-not-found]

        return output * scale

    sys.modules["own_settings"].scale = weight  # type: ignore[attr-defined]
    return loss


def of_a_module(weight: float) -> Any:
    sys.modules["own_settings"].scale = weight  # type: ignore[attr-defined]
    names = {"own_settings": sys.modules["own_settings"]}
    return eval("lambda output: output * own_settings.scale", names)  # noqa: S307


def wrapped(weight: float) -> Any:
    return functools.wraps(F.cross_entropy)(eval(f"lambda output: output * {weight}", {}))  # noqa: S307


def of_a_library(weight: float) -> Any:
    return torch.optim.swa_utils.get_ema_multi_avg_fn(weight)


class Doubling(enum.Enum):
    ON = 1

    def __call__(self, x: float) -> float:
        return 2 * x


class Tripling(enum.Enum):
    ON = 1

    def __call__(self, x: float) -> float:
        return 3 * x


Tripling.__qualname__ = "Doubling"  # as if the code had been edited


class Side(enum.Flag):
    LEFT = enum.auto()
    RIGHT = enum.auto()


class Color(enum.StrEnum):
    RED = "red"


class Named(NamedTuple):
    rate: float


VALUES: dict[str, Callable[[float], Any]] = {
    "a function's attribute": attribute,
    "a slot": Slotted,
    "an attribute of a dict": Numbers,
    "the class of a number": lambda x: (Half if x < 0.2 else Third)(1.0),
    "a generator": generator,
    "an import inside": imports,
    "a module's number": of_a_module,
    "a library's closure": of_a_library,
    "another's name": wrapped,
    "a number with methods of its own": lambda x: (Half if x < 0.2 else Third)(x),
    "a number of a class of one's own": Half,
    "what a member of an enumeration does": lambda x: (Doubling if x < 0.2 else Tripling).ON,
    "a tuple with names": Named,
    "a bound method": lambda x: np.random.default_rng(int(8 * x)).random,
}


@pytest.fixture
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("own_settings")
    module.__file__ = str(tmp_path / "own_settings.py")
    (tmp_path / "own_settings.py").write_text("scale = 1.0\n")
    monkeypatch.setitem(sys.modules, "own_settings", module)
    return


@pytest.mark.usefixtures("own_settings")
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("quick", [False, True])
def test_two_values_have_two_digests_or_none(name: str, quick: bool) -> None:
    first = digest_of(VALUES[name](0.125), quick=quick)
    assert not first or first != digest_of(VALUES[name](0.5), quick=quick)


def test_what_is_common_has_a_digest() -> None:
    described = [
        F.cross_entropy, nn.CrossEntropyLoss(weight=torch.ones(3)), Weighted(), attribute(0.5), dropping(),
        nn.TransformerEncoderLayer(8, 2), torch.utils.data.default_collate, {"a": np.zeros((0, 3))},
        np.float32(0.5), np.dtype("int8"), Path("data"), Named(0.5), Doubling.ON, Side.LEFT, Color.RED,
        types.SimpleNamespace(rate=0.5), logging.getLogger("own"),
    ]  # fmt: skip
    for value in described:
        assert digest_of(value)
        assert digest_of(value, quick=True)
    assert not digest_of(torch.eye(2).to_sparse())
    assert undescribed(described) == ""
    assert undescribed({"a": [np.random.default_rng(0)]}) == "Generator"
    before = digest_of(Side)
    assert Side.LEFT | Side.RIGHT
    assert digest_of(Side) == before


def test_a_fork_says_which_part_changed(problem: Problem) -> None:
    state = problem.crashed(problem.run())
    same = problem.resumed(problem.run(), state)
    assert same.resumed.startswith("replay: Rows 3 to ")
    same.close()
    other = problem.resumed(problem.run(loss=nn.CrossEntropyLoss(label_smoothing=0.1)), state)
    assert other.resumed.startswith("fork: ")
    assert other.resumed.endswith("what shapes them (loss) has changed since.")
    entries = problem.ledger.export()["entries"]
    assert any(entry.get("reason", "").endswith("(loss) has changed since.") for entry in entries)


def test_a_model_that_cannot_be_described_is_named_beforehand(problem: Problem) -> None:
    net = model()
    net.generator = np.random.default_rng(0)
    caveats = problem.run(net).statement().caveats
    assert any("model computes cannot be told for certain (Generator)" in caveat for caveat in caveats)


def test_a_file_that_hides_a_module_of_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dpcore.torch.describe import _library

    module = types.ModuleType("colorsys")
    module.__file__ = str(tmp_path / "colorsys.py")
    monkeypatch.setitem(sys.modules, "colorsys", module)
    _library.cache_clear()
    try:
        assert _library("colorsys") is None
        assert _library("random") == "random"
    finally:
        _library.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(0, 2), (1,), (7,), (33, 65), (3, 1024)])
def test_any_change_changes_a_checksum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    tensor = (torch.arange(count) % 2 if dtype == torch.bool else torch.arange(count) % 200).to(dtype).reshape(shape)
    known, flat = checksum(tensor), tensor.reshape(-1)
    assert known == checksum(tensor.clone())
    changed = [flat.flip(0), flat.roll(1), flat.roll(1024)] if count > 1 else []
    if dtype != torch.bool and count:
        changed += [flat * 2 + 1, torch.where(torch.arange(count) == count // 2, flat + 1, flat)]
    if dtype.is_floating_point:
        changed.append(-flat - 1)
    for other in changed:
        assert torch.equal(other, flat) or checksum(other.reshape(shape)) != known
    rows = row_hashes(tensor)
    assert rows.shape == (shape[0],)
    assert np.array_equal(rows[-1:], row_hashes(tensor[-1:].clone()))


# What left is counted


def test_rows_that_left_before_the_ledger_knew_fix_nobody_else(tmp_path: Path) -> None:
    """A plan chosen by their results is not fixed beforehand, even if its run is begun in time."""
    free = {"key": None, "exact_key": False, "epochs": 10}
    run = start(model(), **free)
    go(run, 1)
    state = saved(run)
    ledger = Ledger.create(tmp_path / "ledger", budget=(60.0, 1e-5))
    chosen = begin(ledger, full, steps=4)
    again = start(model(), ledger=ledger, **free)
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.begin()
    assert sum(one.releases for one in ledger.runs()) == 1
    chosen.reserve(0)
    assert ledger.total().fixed_runs == (ledger.runs()[1].run_id,)
    assert ledger.verify().valid


def test_a_charge_for_what_has_left_fixes_nobody_else(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(3.0, 1e-5))
    begin(ledger, full, steps=4)
    run_id = ledger.charge(full(1, 0), name="seen", left=True)
    assert ledger.total().fixed_runs == (run_id,)


def test_an_interruption_right_after_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises KeyboardInterrupt when SQLite returns: the rows are on disk, and the run does not know it."""
    ledger = new(tmp_path)
    run = begin(ledger)
    run.reserve(0)
    reserve = Reservations.reserve

    def interrupted(self: Reservations, held: Any, row: int, size: int) -> int:
        reserve(self, held, row, 8)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Reservations, "reserve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.reserve(1)
    run.reserve(1)
    assert run.mark == run.releases == 9
    for row in range(2, 12):
        run.reserve(row)
    assert ledger.verify().valid


def test_a_row_on_its_way_is_not_given_back(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler, or the end of the process, closes the account while another frame releases."""
    run = problem.run()
    go(run, 2)
    prepared = Mechanism._prepared

    def closing(self: Mechanism, *rest: Any) -> Any:
        run.close()
        return prepared(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Mechanism, "_prepared", closing)
        go(run, 1)
    assert problem.ledger.runs()[0].releases == 3


def test_noise_of_the_callers_is_not_counted_as_private(tmp_path: Path) -> None:
    method = dp_sgd(lr=0.1, noise_multiplier=1.0)
    with pytest.raises(ArgumentError, match="noise with a ledger: noise of the caller's hides nothing"):
        minimize(
            lambda x, indices: np.zeros((len(indices), 2)),
            np.zeros(2),
            PoissonSampler(dataset_size=50, batch_size=5),
            method,
            steps=3,
            noise=np.zeros((3, 2)),
            ledger=new(tmp_path),
        )
