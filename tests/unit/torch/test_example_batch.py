"""What a model is tried on: made-up values that leave masks open, or the caller's public examples."""

from typing import Any

import pytest
import torch
from torch import nn

from dpcore.errors import ArgumentError, DpcoreError
from dpcore.torch.data import batches
from dpcore.torch.data.batches import trial_batch
from tests.unit.torch_runs import finish, sgd, start

TOKENS = torch.arange(90).reshape(30, 3) % 5 + 10  # of a secret language: ids 10 to 14
TIMES = torch.linspace(0.1, 0.9, 30)
DATA = ({"ids": TOKENS, "time": TIMES, "seen": torch.ones(30, 3, dtype=torch.bool)}, torch.arange(30) % 3)
EXAMPLES = (
    {
        "ids": torch.tensor([[5, 6, 7], [6, 7, 9], [8, 8, 8]]),
        "time": torch.tensor([0.25, 0.5, 1.0]),
        "seen": torch.tensor([[True, True, False], [True, True, True], [True, False, False]]),
    },
    torch.tensor([2, 1, 0]),
)


class Ranged(nn.Module):
    """Refuses what is no input of it. `tried`: nothing but the examples may come until it is set to False."""

    def __init__(self, mixes: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mixes = nn.Embedding(15, 3), mixes
        self.register_buffer("least", torch.tensor(5))

    def forward(self, ids: torch.Tensor, time: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        rows = self.embed(ids - 5) * time[:, None, None]
        if self.mixes == "ids":
            rows = rows + (ids.sum(1, keepdim=True)[..., None] - ids.sum()) * 0.1
        if self.mixes == "time":
            rows = rows + 1e-6 * time.sum()
        if self.mixes == "seen":
            rows = rows * seen.sum()
        return (rows * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)


def test_ids_above_one_need_an_example_batch() -> None:
    with pytest.raises(ArgumentError, match=r"failed on inputs that are public, or made up.*example_batch="):
        start(Ranged(), data=DATA)
    net = Ranged()
    before = net.embed.weight.detach().clone()
    run = start(net, data=DATA, example_batch=EXAMPLES)
    assert torch.equal(net.embed.weight, before)
    assert not torch.equal(finish(run), before.flatten())


@pytest.mark.parametrize("field", ["ids", "time", "seen"])
def test_a_model_that_mixes_is_noticed_on_the_examples(field: str) -> None:
    with pytest.raises(ArgumentError, match=r"a sum over the examples with the examples .*line \d+, in forward"):
        start(Ranged(field), data=DATA, example_batch=EXAMPLES)


def test_nothing_but_the_examples_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, since what the model kept would be state."""

    class Telling(Ranged):
        def forward(self, ids: torch.Tensor, time: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            if not torch._C._functorch.is_functorch_wrapped_tensor(ids):
                print(  # noqa: T201
                    *(f"{row} {at:.2f}" for row, at in zip(ids.tolist(), time.tolist(), strict=True)),
                    sep="\n",
                )
            return super().forward(ids, time, seen)

    start(Telling(), data=DATA, example_batch=EXAMPLES, gradients="one-by-one", microbatch_size=1)
    ids, times, _ = EXAMPLES[0].values()
    rows = {f"{row} {at:.2f}" for row, at in zip(ids.tolist(), times.tolist(), strict=True)}
    assert set(capsys.readouterr().out.splitlines()) == rows


def changed(**fields: Any) -> Any:
    return {**EXAMPLES[0], **fields}, EXAMPLES[1]


# fmt: off
REFUSED = {
    "no targets": (lambda: EXAMPLES[0], r"example_batch\[0\]\['ids'\] with nothing for an example"),
    "another length": (
        lambda: changed(ids=EXAMPLES[0]["ids"][:, :2]),
        r"example_batch\[0\]\['ids'\] with torch\.Size\(\[2\]\).*the form of the data's batches, torch\.Size\(\[3\]\)"),
    "another dtype": (lambda: changed(time=EXAMPLES[0]["time"].double()), r"\['time'\] with .*float64.*float32"),
    "a field too few": (lambda: changed(seen=None), r"example_batch\[0\]\['seen'\] with nothing"),
    "text": (lambda: changed(ids="a"), r"example_batch\[0\]\['ids'\]='str': a batch has tensors"),
    "one example": (lambda: batches.tree_map(lambda t: t[:1], EXAMPLES), "two examples or more"),
    "no example": (lambda: batches.tree_map(lambda t: t[:0], EXAMPLES), "two examples or more"),
    "twice the same": (lambda: batches.tree_map(lambda t: t[[0, 1, 1]], EXAMPLES), "no two neighbors with the same"),
    "the last as the first": (lambda: batches.tree_map(lambda t: t[[0, 1, 0]], EXAMPLES), "the last and the first"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_an_example_batch_that_shows_nothing_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(DpcoreError, match=words):
        start(Ranged(), data=DATA, example_batch=make())


def test_real_steps_of_a_model_with_a_cache_are_compared_on_the_examples() -> None:
    """What the first real examples leave is made again on made-up ones, which zeros of these fields are not."""

    class Sizes(Ranged):
        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, torch.Tensor] = {}

        def forward(self, ids: torch.Tensor, time: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.known.setdefault(ids.shape[1], torch.ones(()))
            return super().forward(ids, time, seen)

    net = Sizes()
    run = start(net, sgd(), data=DATA, example_batch=EXAMPLES, gradients="one-by-one")
    net.eval()
    net.known.clear()
    finish(run, stop=2)
    assert list(net.known) == [3]


MASKS = {
    "x": torch.zeros(1, 4),
    "attention_mask": torch.zeros(1, 4, dtype=torch.int64),
    "key_padding_mask": torch.zeros(1, 4, dtype=torch.bool),
    "short_mask": torch.zeros(1, 1, dtype=torch.int64),
    "float_mask": torch.zeros(1, 4),
    "chosen": torch.zeros(1, 2, 4, dtype=torch.bool),
    "flag": torch.zeros(1, dtype=torch.bool),
    "types": torch.zeros(1, 64, dtype=torch.int64),
}


@pytest.mark.parametrize("other", [False, True])
def test_no_row_of_a_made_up_mask_is_masked_as_a_whole(other: bool) -> None:
    made = batches.synthetic(MASKS, 5, other=other)
    for name, kept in (("attention_mask", 1), ("key_padding_mask", 0), ("chosen", 1)):
        assert made[name].dtype == MASKS[name].dtype
        assert (made[name][..., :-1] == kept).all()
        assert (made[name][..., -1] == (1 - kept if other else kept)).all()
    assert (made["short_mask"] == 1).all()
    assert made["types"].unique().tolist() == [0, 1]
    assert not (made["float_mask"] == made["float_mask"].round()).any()


def test_another_batch_differs_in_every_entry_that_is_no_mask() -> None:
    made, other = batches.synthetic(MASKS, 5), batches.synthetic(MASKS, 5, other=True)
    for name in ("x", "flag", "types", "float_mask"):
        assert (made[name] != other[name]).all()


class Attends(nn.Module):
    """A transformer's layer, told what to leave out by a mask of either kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.attention, self.head = kind, nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, **mask: torch.Tensor) -> torch.Tensor:
        out = mask[self.kind] if self.kind == "padding_mask" else mask[self.kind] == 0
        rows, _ = self.attention(x, x, x, key_padding_mask=out, need_weights=False)
        assert self.head is not None
        return self.head(rows.mean(1))


@pytest.mark.parametrize("kind", ["attention_mask", "padding_mask"])
def test_attention_has_something_to_attend_to_in_every_trial(kind: str) -> None:
    masked = torch.arange(4).expand(30, 4) < 3
    mask = masked.to(torch.int64) if kind == "attention_mask" else ~masked
    torch.manual_seed(1)
    data = ({"x": torch.randn(30, 4, 4), kind: mask}, torch.arange(30) % 3)
    net = Attends(kind)
    run = start(net, data=data)
    example = batches.tree_map(lambda tensor: tensor[:1], data)
    for batch in (trial_batch(example, 3), trial_batch(example, 3, other=True)):
        assert batches.call(net, batch[0]).isfinite().all()
    assert finish(run).isfinite().all()


def test_the_examples_are_taken_in_turn_and_another_batch_has_the_next_one_in_each_place() -> None:
    public = batches.Public(EXAMPLES)
    rows = [made[1].tolist() for made in (batches.synthetic(public, 4), batches.synthetic(public, 4, other=True))]
    assert rows == [[2, 1, 0, 2], [1, 0, 2, 1]]
    assert [trial_batch(public, 2, other, label=7)[1].tolist() for other in (False, True)] == [[2, 1], [1, 0]]
    inputs, target = batches.synthetic(public, 2)
    assert torch.equal(inputs["ids"], EXAMPLES[0]["ids"][:2])
    assert torch.equal(target, EXAMPLES[1][:2])
