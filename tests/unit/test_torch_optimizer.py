"""The optimizer's interface: groups, schedulers, state; and the order in which batches must be stepped."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import dpcore
import dpcore.torch
from dpcore import accounting
from dpcore.errors import ArgumentError, ArgumentTypeError, BackendError, DpcoreError, PrivacyError
from dpcore.sampling import FixedOrderSampler, PoissonSampler

KEY = bytes(range(32))
DATA = (torch.arange(150.0).reshape(30, 5) / 150, torch.arange(30) % 3)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def sgd(**settings: Any) -> dpcore.Method:
    return dpcore.methods.dp_sgd(**{"lr": 0.3, "noise_multiplier": 1.0, "batch_size": 8, **settings})


def start(net: nn.Module, method: dpcore.Method | None = None, **options: Any) -> dpcore.torch.PrivateRun:
    options = {"data": DATA, "epochs": 3, "target_delta": 1e-5, "key": KEY, "exact_key": True, **options}
    return dpcore.torch.make_private(net, options.pop("data"), sgd() if method is None else method, **options)


def values(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


# ---- groups and schedulers


def test_is_a_torch_optimizer_with_the_methods_settings() -> None:
    run = start(model(), dpcore.methods.dp_adam(lr=0.1, betas=(0.8, 0.95), noise_multiplier=1.0, batch_size=8))
    assert isinstance(run.optimizer, torch.optim.Optimizer)
    (group,) = run.optimizer.param_groups
    assert {key: group[key] for key in group if key != "params"} == {
        "lr": 0.1,
        "betas": (0.8, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert run.optimizer.defaults["betas"] == (0.8, 0.95)


SCHEDULERS = {
    "cosine": (sgd, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=12)),
    "lambda": (sgd, lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.0 if t == 2 else 1 / (1 + t))),
    "one cycle": (
        lambda: dpcore.methods.dp_adam(lr=0.1, noise_multiplier=1.0, batch_size=8),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=12),
    ),
    "one cycle momentum": (
        lambda: sgd(base="momentum"),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=12),
    ),
    "warm up, then exponential": (
        sgd,
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_work_unmodified(name: str) -> None:
    """The same numbers as set by hand, step by step, from the same scheduler on a torch optimizer."""
    method, schedule = SCHEDULERS[name]
    run = start(model(), method())
    scheduler = schedule(run.optimizer)
    by_hand = start(model(), method())
    twin_class = torch.optim.Adam if "betas" in run.optimizer.defaults else torch.optim.SGD
    twin = twin_class(
        [nn.Parameter(torch.zeros(()))],
        **{k: v for k, v in by_hand.optimizer.defaults.items() if k in ("lr", "betas", "momentum")},
    )
    twin_scheduler = schedule(twin)
    seen = set()
    for _ in range(3):
        for batch, same in zip(run.loader, by_hand.loader, strict=True):
            assert torch.equal(batch[0], same[0])
            for key in ("lr", "betas", "momentum"):
                if key in by_hand.optimizer.defaults:
                    by_hand.optimizer.param_groups[0][key] = twin.param_groups[0][key]
            seen.add(twin.param_groups[0]["lr"])
            run.step(batch)
            scheduler.step()
            by_hand.step(same)
            twin.step()
            twin_scheduler.step()
    assert len(seen) > 3
    assert torch.equal(values(run.model), values(by_hand.model))


def test_groups_have_their_own_learning_rates() -> None:
    net = model()
    groups = [{"params": net[0].parameters(), "lr": 0.0}, {"params": net[2].parameters(), "weight_decay": 0.5}]
    first, second = values(net[0]).clone(), values(net[2]).clone()
    run = start(net, params=groups)
    for batch in run.loader:
        run.step(batch)
    assert torch.equal(values(net[0]), first)
    assert not torch.equal(values(net[2]), second)
    twin = model()
    same = start(twin)
    same.optimizer.param_groups[0]["weight_decay"] = 0.5
    same.step(next(iter(same.loader)))
    one = model()
    other = start(one, params=[{"params": one[0].parameters()}, {"params": one[2].parameters(), "weight_decay": 0.5}])
    other.step(next(iter(other.loader)))
    assert torch.equal(values(twin[2]), values(one[2]))
    assert not torch.equal(values(twin[0]), values(one[0]))


@pytest.mark.parametrize("key", ["max_grad_norm", "noise_multiplier", "clipping_groups"])
def test_privacy_settings_in_a_group_are_refused(key: str) -> None:
    net = model()
    with pytest.raises(PrivacyError, match=f"{key}=2.0 in a parameter group"):
        start(net, params=[{"params": net.parameters(), key: 2.0}])
    run = start(net)
    run.optimizer.param_groups[0][key] = 2.0
    before = values(net).clone()
    with pytest.raises(PrivacyError, match=f"{key}=2.0 in a parameter group"):
        run.step(next(iter(run.loader)))
    assert torch.equal(values(net), before)
    assert run.steps_taken == 0


GROUPS_REFUSED = {
    "unknown setting": (lambda n: [{"params": n.parameters(), "weight_decy": 0.1}], "did you mean 'weight_decay'"),
    "setting of another update": (lambda n: [{"params": n.parameters(), "betas": (0.9, 0.99)}], "betas"),
    "left out": (lambda n: n[0].parameters(), "'2.weight' requires gradients and is in no group"),
    "foreign": (lambda n: [*n.parameters(), nn.Parameter(torch.zeros(2))], "do not belong to the model"),
    "empty": (lambda n: [], "must hold parameters"),
}


@pytest.mark.parametrize("name", GROUPS_REFUSED)
def test_groups_refused(name: str) -> None:
    make, words = GROUPS_REFUSED[name]
    net = model()
    with pytest.raises(DpcoreError, match=words):
        start(net, params=make(net))


def test_no_group_can_be_added_later() -> None:
    run = start(model())
    with pytest.raises(PrivacyError, match="add_param_group"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("key", "value"), [("lr", float("nan")), ("lr", -1.0), ("weight_decay", -0.1), ("momentum", 1.0)]
)
def test_bad_group_values_are_refused_before_the_step(key: str, value: float) -> None:
    run = start(model(), sgd(base="momentum"))
    run.optimizer.param_groups[0][key] = value
    with pytest.raises(ArgumentError, match=f"{key}="):
        run.step(next(iter(run.loader)))
    assert run.steps_taken == 0


# ---- the order of batches


def test_each_batch_is_stepped_once_in_order() -> None:
    run = start(model())
    batch = next(iter(run.loader))
    run.step(batch)
    with pytest.raises(PrivacyError, match="no drawn batch is waiting"):
        run.step(batch)
    with pytest.raises(PrivacyError, match="no batch was summed"):
        run.optimizer.step()
    batches = iter(run.loader)
    batch = next(batches)
    with pytest.raises(PrivacyError, match="was not stepped"):
        next(batches)
    again = next(iter(run.loader))
    assert torch.equal(batch[0], again[0])
    with pytest.raises(PrivacyError, match="another number of examples"):
        run.step((again[0][:-1], again[1][:-1]))
    with pytest.raises(PrivacyError, match="disagree about the number") as caught:
        run.step((again[0][:-1], again[1]))
    assert not any(character.isdigit() for character in str(caught.value))
    assert run.steps_taken == 1
    run.step(again)
    assert run.steps_taken == 2


def test_without_a_draw_there_is_no_step() -> None:
    run = start(model())
    with pytest.raises(PrivacyError, match="no drawn batch is waiting"):
        run.step(DATA)


def test_iterations_are_epochs_and_end_with_the_plan() -> None:
    run = start(model(), steps=6, epochs=None)
    assert len(run.loader) == 4  # 30 examples, 8 a step
    counts = []
    for _ in range(2):
        counts.append(0)
        for batch in run.loader:
            run.step(batch)
            counts[-1] += 1
    assert counts == [4, 2]
    with pytest.raises(PrivacyError, match="plan's 6 steps have been taken"):
        next(iter(run.loader))
    with pytest.raises(PrivacyError, match="no drawn batch"):
        run.step(DATA)
    assert run.epsilon() == pytest.approx(run.plan.epsilon(1e-5))


def test_every_fixed_order_epoch_sees_every_example_once() -> None:
    run = start(model(), sampling="fixed_order")
    for _ in range(3):
        seen = torch.cat([(run.step(batch), batch[0])[1] for batch in run.loader])
        assert seen.shape == (30, 5)
        assert torch.equal(seen.sort(0).values, DATA[0].sort(0).values)


@pytest.mark.parametrize("where", ["second micro-batch", "step hook"])
def test_a_failed_step_can_be_tried_again_and_counts_no_example_twice(where: str) -> None:
    countdown = [-1]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise RuntimeError("out of paper")
        return nn.functional.cross_entropy(output, target)

    def hook(*_: Any) -> None:
        raise ArgumentError("out of paper")

    run = start(model(), loss=loss, microbatch_size=2)
    batch = next(iter(run.loader))
    assert batch[0].shape[0] > 4
    if where == "step hook":
        handle = run.optimizer.register_step_pre_hook(hook)
    else:
        countdown[0] = 2
    with pytest.raises(ArgumentError) as caught:
        run.step(batch)
    assert "out of paper" in f"{caught.value} {caught.value.__cause__}"
    assert run.steps_taken == 0
    if where == "step hook":
        handle.remove()
    run.step(batch)
    straight = start(model(), microbatch_size=2)
    straight.step(next(iter(straight.loader)))
    assert torch.equal(values(run.model), values(straight.model))


# ---- state


def saved(run: dpcore.torch.PrivateRun) -> dict[str, Any]:
    """Through torch.save and the safe torch.load, as a user does it."""
    file = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def finish(run: dpcore.torch.PrivateRun, scheduler: Any = None, stop: int | None = None) -> torch.Tensor:
    while run.steps_taken < run.plan.steps:
        for batch in run.loader:
            run.step(batch)
            if scheduler is not None:
                scheduler.step()
            if run.steps_taken == stop:
                return values(run.model)
    return values(run.model)


METHODS = {
    "doppler": lambda: dpcore.methods.doppler(lr=0.3, filter="f5", noise_multiplier=1.0, batch_size=8),
    "disk adam": lambda: dpcore.methods.disk(lr=0.03, base="adam", noise_multiplier=1.0, batch_size=8),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_killed_and_resumed_equals_the_straight_run(name: str, stop: int, dtype: torch.dtype) -> None:
    def fresh(**options: Any) -> tuple[dpcore.torch.PrivateRun, Any]:
        torch.manual_seed(options.pop("seed", 1))
        net = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.3), nn.Linear(9, 3)).to(dtype)
        data = (DATA[0].to(dtype), DATA[1])
        run = start(net, METHODS[name](), data=data, key=options.pop("key", KEY), **options)
        return run, lr_scheduler.CosineAnnealingLR(run.optimizer, 12)

    run, scheduler = fresh(microbatch_size=3)
    straight = finish(run, scheduler)
    run, scheduler = fresh(microbatch_size=3)
    finish(run, scheduler, stop=stop)
    state, schedule = saved(run), scheduler.state_dict()
    run, scheduler = fresh(microbatch_size=5, key=bytes(32), seed=2)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"], fork=False)
    scheduler.load_state_dict(schedule)
    assert run.steps_taken == stop
    assert torch.equal(finish(run, scheduler), straight)
    assert run.statement().randomness["forks"] == 0


def test_resuming_forks_by_default_and_the_statement_says_so() -> None:
    run = start(model())
    finish(run, stop=5)
    state = saved(run)
    straight = finish(run)
    ends, batches = [], []
    for _ in range(2):
        again = start(model())
        again.model.load_state_dict(state["model"])
        again.optimizer.load_state_dict(state["optimizer"])
        assert again.steps_taken == 5
        batches.append(next(iter(again.loader))[0])
        ends.append(finish(again))
        statement = again.statement()
        assert statement.randomness["forks"] == 1
        assert "resumed 1 time" in " ".join(statement.caveats)
    assert not torch.equal(ends[0], straight)
    assert not torch.equal(ends[0], ends[1])
    assert batches[0].shape != batches[1].shape or not torch.equal(batches[0], batches[1])


def test_going_back_in_the_same_run_must_fork() -> None:
    run = start(model())
    finish(run, stop=2)
    state = saved(run)
    finish(run, stop=3)
    with pytest.raises(PrivacyError, match="already released steps 3 to 3"):
        run.optimizer.load_state_dict(state["optimizer"], fork=False)
    run.optimizer.load_state_dict(state["optimizer"])
    assert run.steps_taken == 2


@pytest.mark.parametrize("sampling", ["poisson", "fixed_order"])
def test_abandoned_steps_stay_counted(sampling: str) -> None:
    run = start(model(), sampling=sampling)
    finish(run, stop=2)
    state = saved(run)
    finish(run, stop=5)
    run.optimizer.load_state_dict(state["optimizer"])
    spent = {
        name: accounting.epsilon(run.plan.event_after(2, 3), 1e-5, name)
        for name in accounting.accountants_for(run.plan.event_after(2, 3))
    }
    assert run.steps_taken == 2
    assert run.epsilon() == min(spent.values()) > run.plan.epsilon(1e-5, steps=2)
    assert {name: run.epsilon(accountant=name) for name in spent} == spent
    assert run.statement().epsilon == spent
    assert any("3 further step(s)" in caveat for caveat in run.statement().caveats)


def test_two_runs_that_go_on_from_one_state_do_not_share_noise() -> None:
    first, second = (start(model(), key=None, exact_key=False) for _ in range(2))
    finish(first, stop=2)
    state = saved(first)
    second.model.load_state_dict(state["model"])
    second.optimizer.load_state_dict(state["optimizer"], fork=False)
    finish(first, stop=3)
    before = values(second.model)
    with pytest.raises(PrivacyError, match="already released with this key"):
        finish(second)
    assert torch.equal(values(second.model), before)


@pytest.mark.parametrize("part", ["run", "optimizer", "loader"])
def test_nothing_that_holds_keys_is_pickled(part: str) -> None:
    run = start(model())
    whole = {"run": run, "optimizer": run.optimizer, "loader": run.loader}[part]
    file = io.BytesIO()
    with pytest.raises(PrivacyError, match=r"not pickled or copied: save .*state_dict\(\)"):
        torch.save(whole, file)
    with pytest.raises(PrivacyError, match="not pickled or copied"):
        copy.deepcopy(whole)
    assert run._engine.mechanism.keys.noise not in file.getvalue()


def test_a_fork_under_a_fixed_order_keeps_the_order() -> None:
    """A new order halfway would let an example take part twice in one epoch, more often than is accounted."""
    run = start(model(), sampling="fixed_order")
    order = [run.plan.sampler.indices(run._engine.mechanism.keys.sampling, t).tolist() for t in range(8)]
    finish(run, stop=2)
    state = saved(run)
    again = start(model(), sampling="fixed_order", key=bytes(32))
    again.optimizer.load_state_dict(state["optimizer"])
    keys = again._engine.mechanism.keys
    assert keys.noise != run._engine.mechanism.keys.noise
    assert [again.plan.sampler.indices(keys.sampling, t).tolist() for t in range(8)] == order


def test_public_state_holds_no_secret() -> None:
    run = start(model(), dpcore.methods.disk(lr=0.1, noise_multiplier=1.0, batch_size=8))
    finish(run, stop=3)
    state = run.optimizer.state_dict()
    public = dpcore.torch.public_state(state)
    keys = run._engine.mechanism.keys
    assert state["dpcore"]["secret"]["noise_key"] == keys.noise.hex()
    assert set(public["dpcore"]) == {"format", "public"}
    for secret in (keys.noise, keys.sampling):
        assert secret.hex() not in repr(public)
        assert repr(secret) not in repr(public)
    with pytest.raises(ArgumentError, match="secret part"):
        run.optimizer.load_state_dict(public)


OTHER_RUNS = {
    "noise": (lambda: {"method": sgd(noise_multiplier=2.0)}, "noise_multiplier"),
    "clip": (lambda: {"method": sgd(max_grad_norm=2.0)}, "max_grad_norm"),
    "sampler": (lambda: {"sampling": "fixed_order"}, "sampler"),
    "length": (lambda: {"epochs": 4}, "steps is 12, this run's is 16"),
    "update": (lambda: {"method": sgd(base="momentum")}, "update"),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_state_of_other_settings_is_refused(name: str) -> None:
    run = start(model())
    finish(run, stop=2)
    options, words = OTHER_RUNS[name]
    other = start(model(), **options())
    before = as_text(other)
    with pytest.raises(ArgumentError, match=words):
        other.optimizer.load_state_dict(saved(run)["optimizer"])
    assert as_text(other) == before


def as_text(run: dpcore.torch.PrivateRun) -> str:
    torch.set_printoptions(profile="full")
    try:
        return repr(run.optimizer.state_dict())
    finally:
        torch.set_printoptions(profile="default")


def damaged(state: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".", 2) if path.startswith("dpcore") else path.split(".")
    for key in parents:
        state = state[key]
    if "/" in last:
        last, _, rest = last.partition("/")
        state, last = state[last], rest
    if value is None:
        del state[last]
    else:
        state[last] = value


DAMAGE = {
    "format": ("dpcore.format", 2, "its format is 2"),
    "no arrays": ("dpcore.public.arrays", None, "lacks 'arrays'"),
    "layout": ("dpcore.public.layout", [["0.weight", [7, 5], 0]], "its layout"),
    "an array": ("dpcore.public.arrays/0.weight/filter/0", None, "its arrays"),
    "another shape": ("dpcore.public.arrays/2.bias/filter/1", torch.zeros(4), "its arrays"),
    "another dtype": ("dpcore.public.arrays/2.bias/filter/1", torch.zeros(3).double(), "its arrays"),
    "a random generator": ("dpcore.public.rng", "philox", "its rng"),
    "step": ("dpcore.public.step", 13, "its step 13"),
    "a key": ("dpcore.secret.sampling_key", "abc", "'sampling_key'.*64 hexadecimal"),
    "no key": ("dpcore.secret.noise_key", None, "lacks 'noise_key'"),
    "groups": ("param_groups", [], "parameter groups"),
    "a group's setting": ("param_groups", [{"params": [0, 1, 2, 3], "weight_decay": 0.0}], "lacks 'lr'"),
    "a group's value": ("param_groups", [{"params": [0, 1, 2, 3], "weight_decay": -1.0, "lr": 1.0}], "weight_decay="),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_changes_nothing(name: str) -> None:
    path, value, words = DAMAGE[name]
    run = start(model(), METHODS["doppler"]())
    finish(run, stop=2)
    state = saved(run)["optimizer"]
    damaged(state, path, value)
    other = start(model(), METHODS["doppler"](), key=bytes(32))
    finish(other, stop=1)
    before = as_text(other)
    with pytest.raises(ValueError, match=words):
        other.optimizer.load_state_dict(state)
    assert as_text(other) == before


def test_the_saved_noise_multiplier_is_taken_over_where_it_differs_by_rounding() -> None:
    run = start(model(), sgd(noise_multiplier=1.0 - 1e-9))
    finish(run, stop=2)
    other = start(model())
    other.optimizer.load_state_dict(saved(run)["optimizer"])
    assert other.plan.noise_multiplier == 1.0 - 1e-9
    assert other.epsilon() == run.epsilon()
    assert other.epsilon() > other.plan.epsilon(1e-5, steps=1)
    with pytest.raises(ArgumentError, match="noise_multiplier"):
        start(model(), sgd(noise_multiplier=1.0 + 1e-5)).optimizer.load_state_dict(saved(run)["optimizer"])


def test_another_learning_rate_may_resume() -> None:
    run = start(model())
    finish(run, stop=2)
    other = start(model(), sgd(lr=0.01))
    other.optimizer.load_state_dict(saved(run)["optimizer"])
    assert other.optimizer.param_groups[0]["lr"] == 0.3  # as in torch, the saved groups count


def test_a_plain_torch_state_is_refused() -> None:
    net = model()
    run = start(net)
    with pytest.raises(ArgumentError, match="private optimizer"):
        run.optimizer.load_state_dict(torch.optim.SGD(net.parameters(), lr=1).state_dict())


# ---- data


class Rows(Dataset):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return DATA[0][index], int(DATA[1][index])


@pytest.mark.parametrize("workers", [0, 2])
def test_every_kind_of_data_gives_the_same_run(workers: int) -> None:
    ends = []
    read_only = DATA[0].numpy().copy()
    read_only.flags.writeable = False
    for data in (DATA, TensorDataset(*DATA), Rows(), tuple(t.numpy() for t in DATA), [read_only, DATA[1]]):
        run = start(model(), data=data, num_workers=workers)
        ends.append(finish(run))
    for end in ends[1:]:
        assert torch.equal(end, ends[0])


def test_empty_draw_from_a_dataset_has_shapes_and_dtypes() -> None:
    run = start(model(), sgd(batch_size=0.001), data=Rows(), steps=2, epochs=None)
    inputs, targets = next(iter(run.loader))
    assert inputs.shape == (0, 5)
    assert inputs.dtype == torch.float32
    assert targets.shape == (0,)
    assert targets.dtype == torch.int64
    run.step((inputs, targets))


class Augmented(Rows):
    """Random by torch in __getitem__, and again where the examples are joined."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(5), target


def jitter(rows: list[Any]) -> Any:
    inputs, targets = default_collate(rows)
    return inputs + 10 * torch.rand_like(inputs), targets


def drawn(seed: int, key: bytes = KEY, fork: bool | None = None) -> list[torch.Tensor]:
    def fresh() -> dpcore.torch.PrivateRun:
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        run = start(net, data=Augmented(), collate_fn=jitter, key=key, sampling="fixed_order", steps=3, epochs=None)
        assert torch.equal(torch.get_rng_state(), state)
        return run

    net = model()
    run = fresh()
    if fork is not None:
        state, run = run.optimizer.state_dict(), fresh()
        run.optimizer.load_state_dict(state, fork=fork)
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


class Shifted(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + 100, target


def test_a_subclass_of_tensor_dataset_keeps_its_own_getitem() -> None:
    run = start(model(), data=Shifted(*DATA))
    assert (next(iter(run.loader))[0] >= 100).all()


class Ragged(Rows):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        inputs, target = super().__getitem__(index)
        return inputs.repeat(1 + (index == 7), 1).flatten(), target


def padded(rows: list[Any]) -> Any:
    inputs = nn.utils.rnn.pad_sequence([inputs for inputs, _ in rows], batch_first=True)
    return inputs, torch.tensor([target for _, target in rows])


class Means(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mean(1, keepdim=True).expand(-1, 5))


@pytest.mark.parametrize(("collate_fn", "words"), [(padded, "fixed length"), (None, "failed to join")])
def test_padding_to_the_longest_is_refused_without_telling_sizes(collate_fn: Any, words: str) -> None:
    run = start(nn.Sequential(Means(5, 3)), data=Ragged(), collate_fn=collate_fn, sampling="fixed_order")
    with pytest.raises(ArgumentError, match=words) as caught:
        finish(run)
    assert not any(digit in str(caught.value).replace("example 0", "") for digit in "0123456789")


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


ARGUMENTS_REFUSED = {
    "loader": (lambda: {"data": DataLoader(TensorDataset(*DATA))}, "loader.dataset"),
    "iterable": (lambda: {"data": Stream()}, "map-style"),
    "lengths": (lambda: {"data": (DATA[0], DATA[1][:-1])}, "30, 29"),
    "no data": (lambda: {"data": (DATA[0][:0], DATA[1][:0])}, "0 examples"),
    "collate with tensors": (lambda: {"data": DATA, "collate_fn": default_collate}, "collate_fn with tensors"),
    "collate with an array": (lambda: {"data": DATA[0].numpy(), "collate_fn": default_collate}, "TensorDataset"),
    "unknown accountant": (lambda: {"accountant": "pld"}, "accountant='pld'"),
    "accountant of other events": (lambda: {"accountant": "gaussian"}, "accountant='gaussian'"),
    "merging collate": (lambda: {"data": Rows(), "collate_fn": lambda rows: (rows[0][0][None], DATA[1][:1])}, None),
    "no noise": (lambda: {"method": sgd(noise_multiplier=None)}, "target_epsilon"),
    "both": (lambda: {"target_epsilon": 3.0}, "already has noise_multiplier"),
    "no delta": (
        lambda: {"method": sgd(noise_multiplier=None), "target_epsilon": 3.0, "target_delta": None},
        "target_delta=None",
    ),
    "delta": (lambda: {"target_delta": 1.0}, "target_delta=1.0"),
    "epsilon": (lambda: {"method": sgd(noise_multiplier=None), "target_epsilon": -3.0}, "target_epsilon=-3.0"),
    "no batch size": (lambda: {"method": sgd(batch_size=None)}, "batch_size=None"),
    "batch too large": (lambda: {"method": sgd(batch_size=31)}, "batch_size=31"),
    "sampling": (lambda: {"sampling": "poison"}, "did you mean 'poisson'"),
    "sampler of other data": (
        lambda: {"sampling": PoissonSampler(dataset_size=31, batch_size=8)},
        "must be 30",
    ),
    "sampler of other batch": (
        lambda: {"sampling": FixedOrderSampler(dataset_size=30, batch_size=10)},
        "batch_size=8",
    ),
    "epochs and steps": (lambda: {"steps": 3}, "exactly one"),
    "epochs": (lambda: {"epochs": 0}, "epochs=0"),
    "memory": (lambda: {"max_memory": "plenty"}, "max_memory='plenty'"),
    "microbatch": (lambda: {"microbatch_size": 0}, "microbatch_size=0"),
    "method": (lambda: {"method": "disk"}, "dpcore.Method"),
}


@pytest.mark.parametrize("name", ARGUMENTS_REFUSED)
def test_arguments_refused(name: str) -> None:
    options, words = ARGUMENTS_REFUSED[name]
    if words is None:
        run = start(model(), **options())
        with pytest.raises(ArgumentError, match="each as one row") as caught:
            finish(run)
        assert not any(character.isdigit() for character in str(caught.value))
        return
    with pytest.raises(DpcoreError, match=words) as caught:
        start(model(), **options())
    assert "\n" not in str(caught.value)


def test_models_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"torch\.nn\.Module"):
        start(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"BatchNorm1d.*GroupNorm"):
        start(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    mixed = model()
    mixed[0].double()
    with pytest.raises(DpcoreError):
        start(mixed)
    with pytest.raises(ArgumentTypeError, match="float16"):
        start(model().half())


def test_inputs_that_the_model_cannot_take_are_refused_at_once() -> None:
    with pytest.raises(ArgumentError, match="synthetic"):
        start(nn.Linear(6, 3))


def test_changes_of_the_model_after_make_private_are_refused() -> None:
    def stepped(change: Any) -> None:
        net = model()
        run = start(net)
        batch = next(iter(run.loader))
        change(net)
        run.step(batch)

    with pytest.raises(ArgumentError, match=r"'2\.weight' was replaced, removed or frozen"):
        stepped(lambda net: net.__setitem__(2, nn.Linear(7, 3)))
    with pytest.raises(ArgumentError, match=r"'0\.weight' was replaced, removed or frozen"):
        stepped(lambda net: net[0].requires_grad_(False))
    with pytest.raises(ArgumentError, match=r"'3\.weight' was added"):
        stepped(lambda net: net.append(nn.Linear(3, 3)))
    with pytest.raises(ArgumentError, match="changed from"):
        stepped(lambda net: net.double())


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


def test_mappings_of_inputs_reach_the_model_by_keyword() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layer(x), labels)

    class Dicts(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
            x, label = super().__getitem__(index)
            return {"labels": label, "x": x}

    torch.manual_seed(0)
    net = Two()
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(5, 3))
    run = start(net, data=Dicts(), loss=lambda loss: loss)
    assert torch.equal(finish(run), finish(start(twin)))


def test_a_cuda_model_under_numpy_names_set_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the meta device stands in: any device but the CPU takes the same branch."""
    with pytest.raises(BackendError, match=r'dpcore\.set_backend\("triton"\)'):
        start(model().to("meta"))
    from dpcore.torch import working

    class Triton:
        name, arrays = "triton", "torch"

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        working.check_place(Triton(), model())  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendError, match=r"float64 .*model\.float\(\)"):
        working.check_place(Triton(), model().double())  # type: ignore[arg-type]
    working.check_place(Triton(), model().double().float())  # type: ignore[arg-type]


def test_epsilon_grows_to_the_target() -> None:
    run = start(model(), sgd(noise_multiplier=None), target_epsilon=2.0)
    assert run.epsilon() == 0
    spent = []
    for batch in run.loader:
        run.step(batch)
        spent.append(run.epsilon())
    assert spent == sorted(spent)
    finish(run)
    assert 1.99 < run.epsilon() <= 2.0
    assert run.statement().best_epsilon == run.epsilon()
    assert run.statement(1e-6).best_epsilon > 2.0


@pytest.mark.parametrize("sampling", ["poisson", "fixed_order"])
def test_epsilon_is_the_statements_under_every_sampler(sampling: str) -> None:
    run = start(model(), sgd(noise_multiplier=None), sampling=sampling, target_epsilon=4.0)
    finish(run, stop=5)
    statement = run.statement()
    assert 0 < run.epsilon() == statement.best_epsilon < 4.0
    assert statement.epsilon == {name: run.epsilon(accountant=name) for name in statement.epsilon}
    finish(run)
    assert run.epsilon() <= 4.0
    assert run.epsilon(accountant="rdp") == pytest.approx(4.0, rel=1e-2)


def test_without_a_target_delta_one_must_be_asked_for() -> None:
    run = start(model(), target_delta=None)
    with pytest.raises(ArgumentError, match="delta=None"):
        run.statement()
    assert run.statement(1e-5).delta == 1e-5
