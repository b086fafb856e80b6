"""A model's passes that are replayed: gradients and whole runs are those of the model's graph itself."""

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpcore
import dpcore_triton
from dpcore.errors import ArgumentError, SpeedWarning
from dpcore.sampling import FixedOrderSampler, UserSampler
from dpcore.torch import make_private
from dpcore.torch.gradients.per_example import PerExampleGradient, try_out
from dpcore.torch.gradients.repeated import RepeatedPasses
from dpcore_triton import launch, passes, recording
from dpcore_triton.graphs import Graphs
from dpcore_triton.passes import Passes
from dpcore_triton.recording import Recording, repeated
from tests.agreement.runs import RNG
from tests.depth import chosen
from tests.refused import refused
from tests.unit.torch.models import Called
from tests.unit.torch_runs import KEY

DEVICE = launch.default_device()

EXAMPLES = 4


class Shifted(nn.Module):
    """Dropout, a buffer, a frozen and a trained parameter; a sparse buffer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
        self.layers[0].bias.requires_grad_(False)
        self.register_buffer("shift", torch.tensor([0.5]))
        self.register_buffer("edges", torch.eye(5).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.shift.to(x.dtype))


class Side:
    """Gradients of one model, with passes that are repeated or without."""

    def __init__(self, model: nn.Module, example: Any, graphs: bool) -> None:
        self.model = model.to(DEVICE)
        self.gradient = PerExampleGradient(self.model, F.cross_entropy)
        try_out(self.gradient, example, way="pairs")
        if graphs:
            self.gradient.repeated = RepeatedPasses(self.gradient.values, Graphs(dpcore_triton))

    def __call__(self, batch: Any, number: int) -> list[torch.Tensor]:
        return rows_of(self.gradient(self.gradient.parameters(), batch, bytes([number]) * 32, regular="here"))

    @property
    def repeated(self) -> RepeatedPasses:
        assert self.gradient.repeated is not None
        return self.gradient.repeated

    @property
    def replays(self) -> int:
        return sum(one.replays for one in self.repeated.passes.kept.values())


def sides(make: Callable[[], nn.Module], example: Any) -> tuple[Side, Side]:
    """Return a model's gradients without graphs and with them."""
    model = make()
    return Side(model, example, False), Side(model, example, True)


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    for left, right in zip(one, other, strict=True):
        if launch.INTERPRETED:
            assert torch.equal(left, right)
        else:  # the order of a sum may be another
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def batch_of(inputs: Callable[[torch.Generator], torch.Tensor], draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    return inputs(draw).to(DEVICE), torch.randint(0, 3, (EXAMPLES,), generator=draw).to(DEVICE)


def rows_of(blocks: Sequence[Any]) -> list[torch.Tensor]:
    return [block.rows().clone() for block in blocks]


def told(plain: Side, repeating: Side, batches: int, change: Callable[[int], None] = lambda _: None) -> list[str]:
    """Compare some batches; return what was warned of."""
    draw = torch.Generator().manual_seed(4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(batches):
            change(number)
            batch = batch_of(normals(5), draw)
            same(plain(batch, number), repeating(batch, number))
    return [str(warning.message) for warning in found if warning.category is SpeedWarning]


def words() -> nn.Module:
    """Attention, a tied table, and a part that runs again in the backward pass, with its masks."""
    model = Called(
        lambda m, tokens: m.head(checkpoint(m.block, m.table(tokens), use_reentrant=False).mean(1)),
        table=nn.Embedding(7, 4), block=nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True),
        head=nn.Linear(4, 7, bias=False),
    )  # fmt: skip
    model.head.weight = model.table.weight
    return model


def lstm() -> nn.Module:
    layer = nn.LSTM(5, 4, num_layers=2, batch_first=True)
    return Called(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=layer, head=nn.Linear(4, 3))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def normals(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda draw: torch.randn(EXAMPLES, *shape, generator=draw)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], torch.Tensor]]] = {
    "a buffer and masks": (Shifted, normals(5)),
    "integers and a tied table": (words, lambda draw: torch.randint(0, 7, (EXAMPLES, 6), generator=draw)),
    "images": (images, normals(1, 5, 5)),
    "an LSTM": (lstm, normals(6, 5)),
    "16 bits": (lambda: Shifted().bfloat16(), lambda draw: normals(5)(draw).bfloat16()),
}


@pytest.mark.parametrize("case", CASES)
def test_replays_follow_the_batch_the_parameters_the_buffers_and_the_masks(case: str) -> None:
    make, inputs = CASES[case]
    draw = torch.Generator().manual_seed(1)
    plain, repeating = sides(make, batch_of(inputs, draw))
    for number in range(6):
        batch = batch_of(inputs, draw)
        same(plain(batch, number), repeating(batch, number))
        with torch.no_grad():
            for tensor in (*plain.model.parameters(), *plain.model.buffers()):
                if not tensor.is_sparse:
                    tensor += (0.1 * torch.randn(tensor.shape, generator=draw)).to(tensor)
    assert repeating.repeated.refused is None
    assert repeating.replays == 5  # the first call is as ever


def test_a_displaced_point_is_another_pass_and_its_values_are_handed_over() -> None:
    draw = torch.Generator().manual_seed(2)
    plain, repeating = sides(Shifted, batch_of(normals(5), draw))
    for _ in range(6):
        batch = batch_of(normals(5), draw)
        here = plain.gradient.parameters()
        there, elsewhere = ([v + torch.randn(v.shape, generator=draw).to(DEVICE) for v in here] for _ in range(2))
        # Some values displaced and others not, too.
        points = {"here": here, "there": there, "elsewhere": elsewhere, "mixed": [*there[:2], *here[2:]]}
        found = [repeating.gradient(values, batch, KEY, regular=name) for name, values in points.items()]
        for values, blocks in zip(points.values(), found, strict=True):  # all are there, as a query combines them
            same(rows_of(plain.gradient(values, batch, KEY)), rows_of(blocks))
    assert repeating.repeated.refused is None
    assert repeating.replays == 4 * 5


def test_another_form_mode_or_buffer_is_another_pass() -> None:
    draw = torch.Generator().manual_seed(3)
    plain, repeating = sides(Shifted, batch_of(normals(5), draw))
    whole = batch_of(normals(5), draw)
    other = torch.tensor([2.0], device=DEVICE)  # both are alive, and lie in two places
    kept = plain.model.shift
    for number in range(24):
        batch = tuple(t[:3] for t in whole) if number % 6 >= 4 else whole
        plain.model.train(number < 12)
        plain.model.shift = other if number % 4 > 1 else kept
        same(plain(batch, number), repeating(batch, number))
    assert repeating.repeated.refused is None
    assert len(repeating.repeated.passes.kept.values()) == 8


def test_a_parameter_that_was_moved_is_read_where_it_is() -> None:
    draw = torch.Generator().manual_seed(6)
    plain, repeating = sides(Shifted, batch_of(normals(5), draw))
    weight = plain.model.layers[0].weight
    kept = weight.data
    for number in range(6):
        if number == 3:
            weight.data = 2 * kept
        batch = batch_of(normals(5), draw)
        same(plain(batch, number), repeating(batch, number))
    assert repeating.replays == 4


def test_values_that_lie_elsewhere_in_every_step_are_refused_at_last_and_told_once() -> None:
    plain, repeating = sides(Shifted, batch_of(normals(5), torch.Generator().manual_seed(10)))
    buffers = [torch.tensor([float(k)], device=DEVICE) for k in range(40)]

    def change(number: int) -> None:
        plain.model.shift = buffers[number // 2]  # each comes twice, and is captured

    (sentence,) = told(plain, repeating, 80, change)
    assert sentence.startswith("cuda_graphs='model': the model's passes are not repeated (parameters or buffers lie")
    assert repeating.replays == 0  # given back


def dense() -> nn.Module:
    """It reads a buffer that is sparse."""
    model = Called(lambda m, x: m.layer(x @ m.edges.to_dense()), layer=nn.Linear(5, 3))
    model.register_buffer("edges", torch.eye(5).to_sparse())
    return model


@pytest.mark.parametrize("case", ["sparse", "elsewhere"])
def test_a_graph_with_tensors_of_other_kinds_or_devices_is_refused_and_runs_on(case: str) -> None:
    make = dense if case == "sparse" else lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain, repeating = sides(make, batch_of(normals(5), torch.Generator()))
    why = "a tensor is sparse, or of a class of its own"
    if case == "elsewhere":  # as if the model were there
        (program,) = repeating.gradient.proved.programs.values()
        own, program._device = program._device, torch.device("meta")
        why = f"a tensor is on {own}, not on meta"
        assert program.obstacle == why
        program._device = own
    assert told(plain, repeating, 4) == [
        f"cuda_graphs='model': the model's passes are not repeated ({why}); they run as without"
    ]


@pytest.mark.skipif(launch.INTERPRETED, reason="there is one device")
def test_a_number_that_the_host_draws_is_not_repeated() -> None:
    class Scaled(Shifted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.rand(())

    plain, repeating = sides(Scaled, batch_of(normals(5), torch.Generator()))
    (sentence,) = told(plain, repeating, 4)
    assert "a tensor is on cpu, not on cuda:0" in sentence


# -------------------------------------------------------------------------------------------------- whole runs

COMMON: dict[str, Any] = {"noise_multiplier": 0.7, "batch_size": 8, "max_grad_norm": 0.2}

USERS = [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 5, 5, 5, 5]  # more rows than a micro-batch's


def begun(
    graphs: Any, sampling: Any, method: Any, size: int | None = 4, dtype: torch.dtype = torch.float32,
    make: Any = Shifted, **options: Any,
) -> Any:  # fmt: skip
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype)
    data = torch.randn(24, 5).to(dtype), torch.arange(24) % 3
    given: dict[str, Any] = {"microbatch_size": size, "steps": 6, "target_delta": 1e-5} | options
    with dpcore.use_backend("triton"):
        private = make_private(
            model, data, method, sampling=sampling, key=KEY, exact_key=True, cuda_graphs=graphs, **given
        )
    private._engine.mechanism.rng = RNG
    return private


def trained(graphs: Any, *args: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    private = begun(graphs, *args, **options)
    while private.steps_taken < private.plan.steps:
        for batch in private.loader:
            private.step(batch)
    return [value.cpu() for value in private.output_state_dict().values()], private._engine.gradient.repeated


ORDER = FixedOrderSampler(dataset_size=24, batch_size=8)
OF_USERS = UserSampler(FixedOrderSampler(dataset_size=6, batch_size=2), USERS, 6)
RUNS: dict[str, tuple[Any, Any, int, torch.dtype]] = {  # sampler, method, micro-batch, dtype
    "two points": (ORDER, dpcore.methods.disk(lr=0.3, base="momentum", **COMMON), 4, torch.float32),
    "weights that change": (ORDER, dpcore.methods.accelerated_srgd(lr=0.1, radius=1.5, **COMMON), 4, torch.float32),
    "users": (OF_USERS, dpcore.methods.dp_sgd(lr=0.3, **{**COMMON, "batch_size": 2}), 1, torch.float32),
    "16 bits": (ORDER, dpcore.methods.dp_adam(lr=0.05, **COMMON), 4, torch.bfloat16),
}


@pytest.mark.parametrize("name", chosen(["weights that change", "users"], list(RUNS)))
def test_a_training_run_is_that_without_graphs(name: str) -> None:
    (plain, _), (found, repeating) = (trained(graphs, *RUNS[name], steps=2) for graphs in (False, "model"))
    same([value.float() for value in plain], [value.float() for value in found])
    assert repeating.refused is None
    assert sum(one.replays for one in repeating.passes.kept.values()) > repeating._captured


def test_captured_passes_count_against_the_memory_and_are_given_back_where_it_is_short() -> None:
    sampling, method, *_ = RUNS["two points"]
    options: dict[str, Any] = {"size": None, "max_memory": 10_000}
    few, many = (begun(graphs, sampling, method, **options) for graphs in ("model", True))
    assert 1 <= few.microbatch_size <= many.microbatch_size / 2
    engine = begun("model", sampling, method)._engine
    engine.gradient.repeated.passes.of("key", [torch.ones(1, device=DEVICE)], [])
    with pytest.warns(SpeedWarning, match="out of memory"):
        engine._halve()
    assert engine.gradient.repeated.passes.kept.values() == []


class Chosen(Shifted):
    """Without a proof: a value decides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if x.abs().sum() < 1e9 else -y


def test_a_model_without_proof_runs_without_repeated_passes_and_that_is_told() -> None:
    sampling, method, size, _ = RUNS["two points"]
    with pytest.warns(SpeedWarning) as found:
        (plain, _), (other, repeating) = (
            trained(graphs, sampling, method, size, make=Chosen, steps=1) for graphs in (False, "model")
        )
    assert repeating is None
    same(plain, other)
    (sentence,) = {text for warning in found if "cuda_graphs" in (text := str(warning.message))}
    assert "are not repeated, since only proved graphs are, and 'one-by-one' runs the model itself" in sentence


def test_another_word_than_model_is_refused() -> None:
    sampling, method, *_ = RUNS["two points"]
    refused(ArgumentError, "cuda_graphs='all': must be False, True, or 'model'", begun, "all", sampling, method)


# ------------------------------------------------------------------------------------------ work that is captured


def test_a_graph_reads_what_it_was_given_and_draws_anew() -> None:
    read = torch.arange(3.0, device=DEVICE)

    def work(own: list[torch.Tensor]) -> torch.Tensor:
        own[0] += 1  # written to its own memory only
        mask = torch.bernoulli(torch.full((3,), 0.5, device=DEVICE))
        return torch.stack([own[0] * read[own[1]], mask, read.view(1, 3).expand(2, 3)[1]])

    given, order = torch.zeros(3, device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)
    one, places = Passes().of("key", [given, order], [read]), set()
    for number in range(20):
        torch.manual_seed(number)
        expected = work([given.clone(), order])
        if not one.captured:
            one.capture(work, [given, order])
        torch.manual_seed(number)
        found = one.replay([given, order])
        assert torch.equal(found, expected)
        places.add(found.data_ptr())
        given += 1
        order = order.flip(0)
        read *= 1.5
    assert one.replays == 20
    assert len(places) == 1
    assert torch.equal(given, torch.full((3,), 20.0, device=DEVICE))


def test_what_the_work_raises_goes_up() -> None:
    """Its words may show values of the data: others make a sentence of it."""
    given = [torch.ones(3, device=DEVICE)]
    one = Passes().of("key", given, [])

    def work(own: list[torch.Tensor]) -> torch.Tensor:
        raise IndexError("label 7")

    with pytest.raises(IndexError, match="label 7"):
        one.capture(work, given)
    assert one.refused is None
    assert not one.captured


def test_no_capture_follows_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_failed", [True])
    with pytest.raises(RuntimeError, match="an earlier capture of this process failed"):
        recording.captured(lambda: None, DEVICE)


@pytest.mark.skipif(not launch.INTERPRETED, reason="on a device it is what the other tests run")
def test_on_a_device_the_work_itself_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As there, but for the graph, in whose place the operations are recorded."""
    ran: list[str] = []
    records: list[Any] = []

    def captured(work: Callable[[], Any], device: torch.device) -> Any:
        ran.append(f"captured on {device}")
        with Recording({}) as record:
            result = work()
        records.append(record)
        return repeated(record.calls, device), result

    def beside(work: Callable[[], Any], device: torch.device) -> None:
        ran.append("beside")
        work()

    monkeypatch.setattr(passes, "launch", SimpleNamespace(INTERPRETED=False, current_stream=lambda _: 0))
    monkeypatch.setattr(passes, "captured", captured)
    monkeypatch.setattr(passes, "beside", beside)
    read, kept = torch.arange(3.0), Passes()
    one = kept.of("key", [torch.zeros(3)], [read])
    one.capture(lambda own: own[0] * read, [torch.zeros(3)])
    for value in (1.0, 2.0, 3.0):
        assert torch.equal(one.replay([torch.full((3,), value)]), value * read)
    assert ran == ["beside", "captured on cpu"]

    def fails(work: Callable[[], Any], device: torch.device) -> Any:
        raise RuntimeError("no capture\nof this")

    monkeypatch.setattr(passes, "captured", fails)
    one = kept.of("other", [torch.zeros(3)], [read])
    one.capture(lambda own: own[0] * read, [torch.ones(3)])
    assert one.refused == "no capture"
    assert not one.captured
