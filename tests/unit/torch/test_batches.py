"""Batches: every container is walked alike, and the same rows in another container are the same run."""

import collections
import re
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.torch.data import batches
from dpcore.torch.gradients.per_example import WAYS
from tests.depth import pairs
from tests.unit.torch.models import Called, Rows
from tests.unit.torch_runs import DATA, finish, sgd, start


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Record:
    x: Any
    y: Any = None

    def __post_init__(self) -> None:
        assert not isinstance(self.x, str)  # would fail on the names that stand for tensors below


class Output(collections.OrderedDict[str, Any]):
    """Registered with torch's pytree, as the outputs of Hugging Face's models are, and leaving None out."""


_pytree.register_pytree_node(
    Output, lambda o: (list(o.values()), list(o)), lambda values, keys: Output(zip(keys, values, strict=True))
)

A, B = torch.zeros(2, 3), torch.ones(2)
# The container, its type once it is built again, and the names of A and B in it.
CONTAINERS = {
    "list": ([A, B], list, ["[0]", "[1]"]),
    "tuple": ((A, B), tuple, ["[0]", "[1]"]),
    "named tuple": (Pair(A, B), Pair, ["[0]", "[1]"]),
    "dict": ({"a": A, "b": B}, dict, ["['a']", "['b']"]),
    "ordered": (collections.OrderedDict(b=A, a=B), collections.OrderedDict, ["['b']", "['a']"]),
    "registered": (Output(b=A, a=B), Output, ["['b']", "['a']"]),
    "mapping": (UserDict(a=A, b=B), dict, ["['a']", "['b']"]),
    "dataclass": (Record(A, B), Record, [".x", ".y"]),
    "sequence": (collections.UserList([A, B]), tuple, ["[0]", "[1]"]),
    "nested": ({"a": (A, None), "b": Record([B])}, dict, ["['a'][0]", "['b'].x[0]"]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_is_walked_and_built_again(kind: str) -> None:
    tree, built, names = CONTAINERS[kind]
    assert [id(tensor) for tensor in batches.leaves(tree)] == [id(A), id(B)]
    assert list(batches.named(tree)) == [f"batch{name}" for name in names]
    moved = batches.tree_map(lambda tensor: tensor + 2, tree)
    assert type(moved) is built
    assert [tensor.flatten()[0] for tensor in batches.leaves(moved)] == [2, 3]
    assert list(batches.named(moved)) == list(batches.named(tree))
    assert (A.sum(), B.sum(), batches.size(tree)) == (0, 2, 2)


def test_what_else_an_output_holds_is_passed_over_and_a_batch_with_it_is_refused() -> None:
    tree = {"loss": A, "name": "a", "cache": object(), "flag": True, "rest": (B, 3)}
    assert [id(tensor) for tensor in batches.leaves(tree)] == [id(A), id(B)]
    with pytest.raises(ArgumentTypeError, match=r"batch\['name'\]='str': a batch has tensors"):
        batches.tree_map(lambda tensor: tensor, tree)


class Classifier(nn.Module):
    """Takes fields by keyword, or one record."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Any, y: Any = None, extra: Any = None) -> torch.Tensor:
        assert extra is None
        return self.layer(x.x if isinstance(x, Record) else x)


def rows(make: Any) -> Rows:
    """Examples made one by one, of a kind."""
    return Rows(lambda index, x, y: make(x, DATA[1][index]))


class Table:
    """What a Hugging Face dataset offers: rows by number, plain lists and columns that are None."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return {"x": DATA[0][index].tolist(), "y": int(DATA[1][index]), "extra": None}

    def __getitems__(self, places: list[int]) -> list[Any]:
        raise AssertionError("a reading of several rows may mix them")


def encoded(x: torch.Tensor, y: torch.Tensor) -> Any:
    return UserDict(x=x.tolist(), y=int(y), extra=None)


@pytest.fixture(scope="module")
def end() -> torch.Tensor:
    return finish(start(Classifier()), stop=3)


# fmt: off
KINDS = {
    "tuples": lambda: rows(lambda x, y: (x, y)),
    "named tuples": lambda: rows(Pair),
    "lists of numbers": lambda: [(x.tolist(), int(y)) for x, y in zip(*DATA, strict=True)],
    "inputs by keyword": lambda: rows(lambda x, y: ({"x": x, "extra": None}, y)),
    "encodings": lambda: rows(lambda x, y: (UserDict(x=x.tolist()), y)),
    "a mapping of tensors": lambda: (UserDict(x=DATA[0], extra=None), DATA[1]),
    "records": lambda: rows(lambda x, y: (Record(x), y)),
    "a record of tensors": lambda: [(Record(x), y) for x, y in zip(*DATA, strict=True)],
}
# fmt: on


@pytest.mark.parametrize(("kind", "way"), pairs(KINDS, WAYS, 2))
def test_the_same_rows_in_another_container_are_the_same_run(kind: str, way: str, end: torch.Tensor) -> None:
    found = finish(start(Classifier(), data=KINDS[kind](), gradients=way), stop=3)
    assert torch.allclose(found, end, rtol=0, atol=3e-4)  # rows and pairs round to the grid each in their way


class Labelled(Classifier):
    """Makes its loss of a field, as Hugging Face's models do."""

    def forward(self, x: Any, y: Any = None, extra: Any = None) -> Any:
        return Output(loss=nn.functional.cross_entropy(super().forward(x, y, extra), y))


@pytest.mark.parametrize("kind", ["a table of lists", "encodings", "a list of dicts", "one encoding of tensors"])
def test_a_mapping_is_the_models_keyword_arguments(kind: str, end: torch.Tensor) -> None:
    data = {
        "a table of lists": Table(),
        "encodings": rows(encoded),
        "a list of dicts": [dict(encoded(x, y)) for x, y in zip(*DATA, strict=True)],
        "one encoding of tensors": UserDict(x=DATA[0], y=DATA[1]),
    }[kind]
    found = finish(start(Labelled(), data=data, loss=lambda output: output["loss"]), stop=3)
    assert torch.allclose(found, end, rtol=0, atol=3e-4)  # rows and pairs round to the grid each in their way


@pytest.mark.parametrize("example", [{"x": 1, "text": "a"}, ("a", 1), Record([{"name": b"a"}]), "a"])
def test_text_in_an_example_is_refused_with_the_name_of_its_field(example: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^batch.*='(str|bytes)': a batch has tensors"):
        start(Classifier(), data=rows(lambda x, y: example))


# fmt: off
ODD_ROWS = {
    "a field that is missing at times": lambda x, y, odd: ({"x": x} | ({} if odd else {"extra": x}), y),
    "None at times": lambda x, y, odd: ({"x": x, "extra": None if odd else x}, y),
    "a number that is no integer": lambda x, y, odd: ([1, 2, 0.5 if odd else 3], int(y)),
    "another length": lambda x, y, odd: (x[: 4 if odd else 5], y),
    "a list of another length": lambda x, y, odd: (x[: 4 if odd else 5].tolist(), y),
    "a deeper list": lambda x, y, odd: ([[1.0, 2.0, 3.0, 4.0, 5.0]] if odd else x.tolist(), y),
}
# fmt: on


@pytest.mark.parametrize(("kind", "alone"), pairs(ODD_ROWS, [True, False], 2))
def test_examples_of_another_form_are_refused_without_telling_which(kind: str, alone: bool) -> None:
    """Alone in its batch the odd one stacks, and still is refused: it would be a batch of another form."""

    def mean(m: Any, x: Any, extra: Any = None) -> torch.Tensor:
        return m.layer(x.float().reshape(len(x), -1).mean(1, keepdim=True))

    data = Rows(lambda index, x, y: ODD_ROWS[kind](x, DATA[1][index], index == 1))
    net, method = Called(mean, layer=nn.Linear(1, 3)), sgd(batch_size=1 if alone else 8)
    run = start(net, method, data=data, sampling="fixed_order")
    with pytest.raises(ArgumentError, match="fixed length") as caught:
        finish(run)
    told = re.sub(r"\w+\.py, line \d+", "", str(caught.value)).replace("example 0", "")
    assert not any(digit in told for digit in "0123456789")
