"""Each kind of operation with trained weights: its blocks are what autograd gives one example at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.stages.clipping.blocks import Embedding, Linear, Rows
from dpcore.torch.gradients.errors import Mixes, NotProved
from tests import depth
from tests.unit.torch.gradients.one_by_one import (
    compare,
    layers,
    loss_of_all,
    program,
    proved,
    randomized,
    readout,
    rows,
)
from tests.unit.torch.models import Called

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True", "ignore:Using padding='same'", "ignore:dropout option adds"
)
pick, flag = st.sampled_from, st.booleans()
dtypes = pick([torch.float32, torch.float64])
few = settings(max_examples=max(5, settings().max_examples // 3))  # each example is a capture


def applied(function: Callable[..., Any], *shape: int) -> nn.Module:
    """A function of the inputs and of one parameter."""
    return Called(lambda m, x: function(x, m.parameter), parameter=nn.Parameter(torch.ones(shape)))


# ---------------------------------------------------------------------------------- sums, products, copies and parts


def in_place(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    x = x * 1
    other = x
    x += p
    return x * other.add_(p)


def changed(p: torch.Tensor) -> torch.Tensor:
    p = p.clone()
    p[..., 0] = 0
    return p


OPERATIONS: dict[str, Callable[..., Any]] = {
    "x + p": lambda x, p: x + p,
    "p - x": lambda x, p: p - x,
    "x * p": lambda x, p: x * p,
    "x / p": lambda x, p: x / (p + 3),
    "p / x": lambda x, p: p / (x * x + 1),
    "alpha": lambda x, p: torch.add(x, p, alpha=2),
    "no rule": torch.atan2,
    "x += p": in_place,
    "part": lambda x, p: x * p.narrow(-1, 0, 1),
    "derived, in place": lambda x, p: x * p.clone().mul_(2),
    "part of derived, in place": lambda x, p: x * changed(p),
    "examples, in place": lambda x, p: (x * 1).mul_(p),
}


@few
@given(name=pick(sorted(OPERATIONS)), shape=pick([(4,), (3, 4), (1, 3, 1), (1, 1, 1), (1, 3, 4)]), dtype=dtypes)
def test_operations(name, shape, dtype):
    compare(randomized(readout(applied(OPERATIONS[name], *shape), nn.Linear(2, 4)), dtype), (3, 2), dtype)


COPIES = {
    "repeat": lambda x, p: torch.cat([p.repeat(len(x), 2, 3), x.repeat(1, 1, 3)], 1),
    "repeat of several rows": lambda x, p: p.squeeze(0).repeat(len(x), 1).unflatten(0, (len(x), 2)) + x[:, :2],
    "expand": lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies(name):
    compare(randomized(readout(applied(COPIES[name], 1, 2, 4), nn.Linear(2, 4))), (3, 2))


PARTS = {
    "split": lambda p: p.split([2, 4])[1],
    "chunk": lambda p: p.chunk(3)[1],
    "narrow": lambda p: p.narrow(0, 2, 3),
    "transposed": lambda p: p[1:5].t()[:, :2].t(),
    "columns": lambda p: p[:, 1:3].repeat(1, 2),
    "steps": lambda p: p[::2],
    "one row": lambda p: p[2][None],
    "parts of parts": lambda p: p[1:5][1:3],
    "from the end": lambda p: p[-4:-1],
    "turned parts of parts": lambda p: p.t()[:, -3:][:, 1:].t(),
    "one column": lambda p: p[:, 1:2].expand(-1, 4),
    "two in another order": lambda p: torch.cat(p.split([2, 4])[::-1]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_weight(name):
    compare(randomized(applied(lambda x, p: F.linear(x, PARTS[name](p)) + F.linear(x, p)[..., :1], 6, 4)), (3, 4))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, p: F.linear(x, p[1:5][1:3]),
        lambda x, p: F.linear(F.linear(x, p[:4]), p.split([2, 4])[1]),
        lambda x, p: F.linear(x, p.split([2, 4])[1]) + F.linear(x, p.split([2, 4])[0])[..., :1],
        lambda x, p: torch.einsum("btd,hd->bth", x, p[-3:]),
    ],
)
def test_a_part_is_a_pair(forward):
    (block,) = compare(randomized(applied(forward, 6, 4)), (3, 4))
    assert isinstance(block, Linear)
    assert block.shape == (6, 4)


def test_parts_of_other_tensors():
    compare(randomized(applied(lambda x, p: x * p[1:5] + p[:4], 6)), (3, 4))
    compare(randomized(applied(lambda x, p: F.conv1d(x, p[1:4]), 6, 3, 2)), (3, 4))


SIZES = {"t": 3, "d": 4, "h": 5, "n": 2, "k": 2}
EQUATIONS = {  # pairs where it is a product of matrices, rows elsewhere; None is either
    "btd,dh->bth": Linear,
    "btd,hd->bth": Linear,
    "btd,hd->htb": Linear,
    "btd,dh->bh": None,
    "btd,dnk->btnk": Rows,
    "btd,td->bt": Rows,
    "btd,tdh->bth": Rows,
    "btd,d->bt": Rows,
    "btd,dh->bt": None,
    "btd,t->btd": Rows,
    "btd,h->bthd": Rows,
    "... d, d h -> ... h": None,
}


@pytest.mark.parametrize(("equation", "turned"), depth.pairs(EQUATIONS, [False, True], 2))
def test_einsum(equation, turned):
    (left, right), out = equation.replace(" ", "").split("->")[0].split(","), equation.split("->")[1]

    def forward(x, p):
        found = torch.einsum(f"{right},{left}->{out}", p, x) if turned else torch.einsum(equation, x, p)
        return found.movedim(-1, 0) if out.endswith("b") else found

    model = readout(applied(forward, *(SIZES[letter] for letter in right)), nn.Linear(2, 4))
    block, kind = compare(randomized(model), (3, 2))[2], EQUATIONS[equation]
    assert kind is None or isinstance(block, kind)


# ------------------------------------------------------------------------------------------------------ convolutions

PAIRS = "dpcore.torch.gradients.convolution._PAIRS"
KINDS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


def folded_images(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Two images of each example, which a convolution sees as examples of their own."""
    both = torch.stack([x, x.flip(1)], 1).flatten(0, 1)
    return m.inner(both).unflatten(0, (len(x), 2))


def convolved(module, dims, dtype=torch.float64, folded=False, pairs=1e9):
    """Compare a convolution; `pairs` decides whether it is taken as pairs (0) or as rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PAIRS, pairs)
        model = readout(Called(folded_images, inner=module) if folded else module, nn.Linear(5, 5))
        block = compare(randomized(model, dtype), (4, *[5] * dims), dtype)[2]
    assert isinstance(block, Linear if pairs == 0 and module.groups == 1 else Rows)


common = {
    "kernel_size": pick([1, 2, 3]), "dilation": pick([1, 2]), "groups": pick([1, 1, 2]), "bias": flag,
}  # fmt: skip
forms = {"dims": pick([1, 2, 3]), "dtype": dtypes, "folded": flag, "pairs": pick([0.0, 1e9])}


@few
@given(
    options=st.fixed_dictionaries({
        **common, "stride": pick([1, 2, 3]), "padding": pick([0, 1, 2, "same", "valid"]),
        "padding_mode": pick(["zeros", "zeros", "circular"]),
    }),
    **forms,
)  # fmt: skip
def test_convolutions(options, dims, **form):
    assume(options["padding"] != "same" or options["stride"] == 1)
    convolved(KINDS[dims - 1](4, 8, **options), dims, **form)


@few
@given(
    options=st.fixed_dictionaries({
        **common, "stride": pick([1, 2]), "padding": pick([0, 1]), "output_padding": pick([0, 1]),
    }),
    **forms,
)  # fmt: skip
def test_transposed_convolutions(options, dims, **form):
    assume(options["output_padding"] < max(options["stride"], options["dilation"]))
    convolved(TRANSPOSED[dims - 1](4, 6, **options), dims, **form)


def test_different_numbers_for_each_dimension():
    options = {"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)}
    for pairs in (0.0, 1e9):
        convolved(nn.Conv2d(4, 3, **options), 2, pairs=pairs)
    convolved(nn.ConvTranspose2d(4, 3, **options, output_padding=(1, 0)), 2, pairs=0.0)
    convolved(nn.Conv2d(4, 3, (2, 3), padding="same"), 2)


def test_large_matrices_of_few_places_are_pairs_and_small_ones_rows():
    few, many = nn.Conv2d(16, 16, 3), nn.Conv2d(1, 4, 3, padding=1)
    assert isinstance(compare(randomized(few), (16, 3, 3))[0], Linear)
    assert isinstance(compare(randomized(many), (1, 8, 8))[0], Rows)


@pytest.mark.parametrize("folded", [False, True])
def test_rows_in_chunks(folded, monkeypatch):
    monkeypatch.setattr("dpcore.torch.gradients.convolution._CHUNK", 2 * 3 * 4 * 2 * 8)
    convolved(nn.Conv1d(4, 3, 2), 1, folded=folded)
    convolved(nn.ConvTranspose1d(4, 3, 2), 1, folded=folded)


# ------------------------------------------------------------------------------------------------------------ tables

TOKENS = 5


def tokens(x: torch.Tensor) -> torch.Tensor:
    """Made-up numbers as tokens, some of them equal."""
    return (x * 100).long() % TOKENS


def lookup(turns: int = 1, ids: torch.dtype = torch.int64, **options: Any) -> nn.Module:
    def forward(s, x):
        rows = tokens(x).to(ids)
        return s.c(rows) if turns == 1 else s.c(rows) * s.c(rows.flip(1))

    return layers(forward, c=nn.Embedding(TOKENS, 3, **options))


def bag(weighted: bool = False, folded: bool = False, **options: Any) -> nn.Module:
    def forward(s, x):
        bags = torch.cat([x, x.flip(1) + 1], 1).reshape(-1, x.shape[1]) if folded else x
        found = s.c(tokens(bags), per_sample_weights=bags * s.factor if weighted else None)
        return found.unflatten(0, (len(x), -1))

    return layers(forward, c=nn.EmbeddingBag(TOKENS, 3, **options), factor=nn.Parameter(torch.ones(4)))


@few
@given(padding=pick([None, 0, -1]), turns=pick([1, 2]), ids=pick([torch.int64, torch.int32]), dtype=dtypes)
def test_lookups(padding, turns, ids, dtype):
    *_, block = compare(randomized(lookup(turns, ids, padding_idx=padding), dtype), (4,), dtype)
    assert isinstance(block, Embedding)


@few
@given(weighted=flag, folded=flag, padding=pick([None, 1]), mode=pick(["mean", "sum"]), dtype=dtypes)
def test_bags(weighted, folded, padding, mode, dtype):
    model = bag(weighted, folded, mode="sum" if weighted else mode, padding_idx=padding)
    assert any(isinstance(block, Embedding) for block in compare(randomized(model, dtype), (4,), dtype))


BAGS = "embedding_bag has a rule for bags of one length alone"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: bag(mode="max"), NotProved, BAGS),
        (lambda: bag(max_norm=1.0), NotProved, BAGS),
        (lambda: bag(mode="sum", scale_grad_by_freq=True), NotProved, BAGS),
        (lambda: lookup(max_norm=1.0), ArgumentError, r"'c' .* changes its parameter 'weight'"),
        (lambda: lookup(scale_grad_by_freq=True), Mixes, "how often all examples hold a token"),
        (lambda: nn.BatchNorm1d(4), ArgumentError, "changes its buffer"),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False), Mixes, "takes statistics over the examples of a batch"),
    ],
)
def test_what_depends_on_other_examples_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        (proved if error is ArgumentError else program)(make(), loss_of_all, (torch.randn(3, 4),))


# ---------------------------------------------------------------------------------------------------- normalizations

NORMS = {
    "layer": nn.LayerNorm,
    "layer of two dimensions": lambda size: nn.LayerNorm((6, size)),
    "layer without bias": lambda size: nn.LayerNorm(size, bias=False),
    "root mean square": nn.RMSNorm,
    "group": lambda _: nn.GroupNorm(3, 6),
    "instance": lambda _: nn.InstanceNorm1d(6, affine=True),
    "batch, evaluated": lambda _: nn.BatchNorm1d(6).eval(),
}


@few
@given(
    kind=pick(sorted(NORMS)),
    size=pick([3, 5]),
    dtype=pick([torch.float32, torch.float64, torch.bfloat16]),
    frozen=pick([None, "weight", "bias"]),
)
def test_normalizations(kind, size, dtype, frozen):
    module = NORMS[kind](size)
    if getattr(module, frozen or "", None) is not None:
        getattr(module, frozen).requires_grad_(False)
    compare(randomized(readout(module, nn.Linear(3, size)), dtype), (6, 3), dtype)


def test_gradients_that_lie_otherwise_than_when_the_graph_was_captured():
    """A layer norm's gradient is contiguous, that of its capture lies as its input did."""

    def forward(s, x):
        h = s.norm(s.group(s.a(x).transpose(1, 2)).transpose(1, 2))
        return s.conv(h.transpose(1, 2))

    parts = {"a": nn.Linear(5, 4), "group": nn.GroupNorm(2, 4), "norm": nn.LayerNorm(4), "conv": nn.Conv1d(4, 4, 3)}
    compare(randomized(layers(forward, **parts)), (4, 5))


LAYERS = [(nn.GroupNorm(2, 4), 20), (nn.InstanceNorm1d(4, affine=True), 20), (nn.AdaptiveMaxPool1d(2), 8)]


@pytest.mark.parametrize(("first", "width"), LAYERS)
def test_batches_that_lie_otherwise_than_when_the_graph_was_captured(first: nn.Module, width: int):
    model = randomized(nn.Sequential(first, nn.Flatten(), nn.Linear(width, 2)))
    usual = torch.randn(3, 4, 5, dtype=torch.float64)
    gradient = proved(model.double(), loss_of_all, (usual,))
    wanted = rows(gradient, (usual,))
    for order in ((2, 1, 0), (1, 2, 0), (0, 2, 1)):
        turned = usual.permute(order).contiguous().permute([order.index(d) for d in range(3)])
        for found, right in zip(rows(gradient, (turned,)), wanted, strict=True):
            assert torch.equal(found, right)


# -------------------------------------------------------------------------------------------------------- recurrence


class Recurrent(nn.Module):
    """A recurrent layer with trained first states; all that it returns is in the output."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(3, 4, **options)
        ways = self.layer.num_layers * (1 + self.layer.bidirectional)
        self.hidden = nn.Parameter(torch.zeros(ways, 1, self.layer.proj_size or 4))
        self.memory = nn.Parameter(torch.zeros(ways, 1, 4)) if kind is nn.LSTM else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, hidden = self.layer.batch_first, self.hidden.expand(-1, len(x), -1)
        given_ = hidden if self.memory is None else (hidden, self.memory.expand(-1, len(x), -1))
        out, states = self.layer(x if first else x.transpose(0, 1), given_)
        states = [states] if self.memory is None else states
        out = out if first else out.transpose(0, 1)
        return torch.cat([out.flatten(1), *(state.transpose(0, 1).flatten(1) for state in states)], 1)


@few
@given(
    kind=pick([nn.LSTM, nn.GRU, nn.RNN]),
    options=st.fixed_dictionaries({
        "num_layers": pick([1, 2]), "bidirectional": flag, "batch_first": flag, "bias": flag,
    }),
    times=pick([1, 2, 5]), dtype=dtypes, special=flag, frozen=flag,
)  # fmt: skip
def test_recurrent_layers(kind, options, times, dtype, special, frozen):
    more = {"nonlinearity": "relu"} if special and kind is nn.RNN else {}
    layer = Recurrent(kind, **options, **more)
    if frozen:
        layer.layer.weight_ih_l0.requires_grad_(False)
    compare(randomized(readout(layer, nn.Linear(3, 3)), dtype), (times, 3), dtype)


@pytest.mark.parametrize("cell", [nn.LSTMCell(3, 4), nn.GRUCell(3, 4, bias=False), nn.RNNCell(3, 4)])
def test_cells(cell):
    def forward(s, x):
        state = None
        for step in x.unbind(1):
            state = s.cell(step, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state

    compare(randomized(readout(layers(forward, cell=cell), nn.Linear(3, 3))), (4, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_recurrent_weight_is_one_pair_of_all_times(kind):
    blocks = compare(randomized(Recurrent(kind, batch_first=True)), (6, 3))
    pairs = [block for block in blocks if isinstance(block, Linear)]
    assert [[a.shape[:2] for a in block.inputs] for block in pairs] == [[(3, 6)]] * 2


def packed(s: Any, x: torch.Tensor) -> torch.Tensor:
    found = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(s.layer(found)[0], batch_first=True)[0]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_packed_sequences_and_projections_are_refused():
    """Lengths are values, of which a graph knows nothing."""
    with pytest.raises(NotProved, match="a value decides"):
        program(layers(packed, layer=nn.GRU(3, 4, batch_first=True)), loss_of_all, (torch.randn(3, 4, 3),))
    with pytest.raises(NotProved, match="projections"):
        program(Recurrent(nn.LSTM, proj_size=2), loss_of_all, (torch.randn(3, 4, 3),))


# --------------------------------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    """Self-attention, of a query to a memory, or with keys and values of their own; padding that depends on numbers."""

    def __init__(self, sources: int, need_weights: bool, masked: bool, padded: bool, **options: Any) -> None:
        super().__init__()
        self.sources, self.need_weights, self.masked, self.padded = sources, need_weights, masked, padded
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.keys = nn.Linear(4, options.get("kdim") or 4)
        self.values = nn.Linear(4, options.get("vdim") or 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.attention.batch_first
        queries = x if first else x.transpose(0, 1)
        keys, values = self.keys(queries), self.values(queries)
        sources = [(queries,) * 3, (queries, keys, keys), (queries, keys, values)][self.sources]
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1) if self.masked else None
        padding = torch.arange(x.shape[1]) > (x[:, :1, 0] > 0).long() + 1 if self.padded else None
        out, weights = self.attention(
            *sources, attn_mask=mask, key_padding_mask=padding, need_weights=self.need_weights,
            average_attn_weights=self.padded, is_causal=self.masked and not self.need_weights,
        )  # fmt: skip
        out = out if first else out.transpose(0, 1)
        return out.tanh() if weights is None else torch.cat([out.tanh().flatten(1), weights.flatten(1)], 1)


@few
@given(
    sources=pick([0, 1, 2]),
    flags=st.tuples(flag, flag, flag),
    options=st.fixed_dictionaries({"batch_first": flag, "bias": flag, "add_bias_kv": flag, "add_zero_attn": flag}),
    own_sizes=flag,
    dtype=dtypes,
)
def test_attention(sources, flags, options, own_sizes, dtype):
    assume(sources == 2 or not own_sizes)
    sizes = {"kdim": 3, "vdim": 5} if own_sizes else {}
    model = readout(Attention(sources, *flags, **options, **sizes), nn.Linear(3, 4))
    compare(randomized(model, dtype), (4, 3), dtype)


def test_projections_are_pairs():
    together, _, out, *_ = compare(randomized(Attention(1, True, False, False)), (5, 4))
    assert isinstance(together, Linear)
    assert (together.shape, len(together.inputs)) == ((12, 4), 2)
    assert isinstance(out, Linear)
    assert out.inputs[0].shape == (3, 5, 4)


@pytest.mark.parametrize(
    "model",
    [
        Attention(0, False, False, False, dropout=0.5),
        Attention(0, True, False, False, dropout=0.5),
        readout(Recurrent(nn.GRU, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(4, 3)),
    ],
)
def test_dropout_takes_torchs_numbers(model):
    """One example in the batch: the rule and torch draw the same mask from the same state."""
    compare(randomized(model), (4, 4), examples=1)
