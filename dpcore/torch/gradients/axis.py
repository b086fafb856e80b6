"""Where the examples lie in every value of a model's graph: the proof that no example meets another one.

A graph is a list of ATen operations in order. Each of its values gets one of three marks:

- an `Axis`: the examples lie along one dimension, and row i is a function of example i alone, of parameters, and of
  random numbers that no other row uses;
- None: the value depends on no example (parameters, constants, random numbers that all share);
- `SUM`: the examples' parts were added up, each part a function of one example. Such a value may only flow on to the
  gradients of parameters, where `dpcore.torch.gradients.sources` finds the parts again.

A rule for each kind of operation derives the marks of its results from those of its arguments, or raises. The proof is
an induction over the operations: if the rules of all operations are right, then each example's part of each gradient is
a function of that example alone. It trusts these rules, and what turns the graph into blocks: proved, sources,
convolution, head, replaced. Every rule has a property test (`tests/unit/torch/gradients/test_rules.py`): replacing one
example leaves the bits of all other rows.

The graph is captured at a number of examples that is a prime and divides no other size (`capture.COUNTS`). So a size
that the prime divides counts examples; the marked dimension has such a size, and no other dimension has. The same graph
serves every number of examples. That number enters as a size (`SIZES`) and nowhere else, so an example's gradient does
not depend on the number of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from dpcore.torch.gradients.errors import Mixes, NotProved


class Axis(NamedTuple):
    """The examples lie along `dim`: entry ``(o B + i) inner + j`` is of example i, for o < `outer` and j < `inner`."""

    dim: int
    outer: int = 1
    inner: int = 1


class Sum:
    """The mark of a value in which the examples' parts were added up."""

    def __repr__(self) -> str:
        return "SUM"


SUM = Sum()


class Places(NamedTuple):
    """The mark of ``arange(B)``: entry ``(o B + i) inner + j`` along the dimension of this axis is the number i.

    They may only be used as an index that gives example i row i, as in x[arange(B), last]; any other use is refused,
    since the result would depend on an example's position in the batch.
    """

    axis: Axis


Mark = Axis | Sum | None
Marks = Any
"""A mark or `Places`, or a list of them for an operation with several results."""

Rule = Callable[["Op"], Marks]
RULES: dict[str, Rule] = {}
"""The rule of an operation by its name without overload."""

CREATES: set[str] = set()
"""Operations that may make rows for the examples from values without examples."""

ONE_NUMBER = ("zeros_like", "ones_like", "full_like", "empty_like")
"""Operations that read the shape of a tensor and not its values."""


SIZES = {"size", "repeats", "split_size", "split_sizes", "end", "input_sizes", "input_size", "N"}
"""Arguments that may be the number of examples, or a multiple of it."""


def rule(*names: str, creates: bool = False) -> Callable[[Rule], Rule]:
    """Register the rule of some operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        if creates:
            CREATES.update(names)
        return function

    return register


def has_rule(operation: Any) -> bool:
    """Whether an operation, or the same one out of place, has a rule."""
    return name_of(operation).removesuffix("_") in RULES or torch.Tag.pointwise in operation.tags


def name_of(operation: Any) -> str:
    """Return an operation's name without namespace and overload, as "mm"."""
    name = str(operation._schema.name) if hasattr(operation, "_schema") else operation.__name__
    space, _, own = name.partition("::")
    return own if space == "aten" else name


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a node's tensor."""
    return tuple(value.meta["val"].shape)


class Op:
    """One operation of the graph as a rule sees it: arguments by name, their shapes and marks."""

    def __init__(self, node: Node, marks: dict[Node, Marks], count: int) -> None:
        self.node, self.marks, self.count = node, marks, count
        self.asked = set[Node]()  # the arguments whose marks a rule has looked at
        schema = node.target._schema  # type: ignore[union-attr]
        self.name = name_of(node.target)
        self.arguments: dict[str, Any] = {}
        for place, argument in enumerate(schema.arguments):
            if place < len(node.args) and not argument.kwarg_only:
                self.arguments[argument.name] = node.args[place]
            else:
                self.arguments[argument.name] = node.kwargs.get(argument.name, argument.default_value)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def mark(self, name: str) -> Mark:
        """Return the mark of an argument."""
        return self.of(self.arguments[name])

    def of(self, value: Any) -> Mark:
        """Return the mark of a node; None for anything else."""
        if not isinstance(value, Node):
            return None
        self.asked.add(value)
        mark: Mark = self.marks.get(value)
        return mark

    def tensors(self, *names: str) -> list[Node]:
        """Return the tensor arguments, of these names or all."""
        values = [self.arguments[name] for name in names] if names else list(self.arguments.values())
        return [value for value in values if isinstance(value, Node) and _is_tensor(value)]

    def rank(self, name: str) -> int:
        """Return the number of dimensions of an argument."""
        return len(shape_of(self.arguments[name]))

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the result, or of the first one."""
        value = self.node.meta["val"]
        return tuple((value[0] if isinstance(value, (tuple, list)) else value).shape)

    def is_known(self, size: Any) -> bool:
        """Whether a size counts examples."""
        return isinstance(size, int) and size > 0 and size % self.count == 0

    def no_examples(self, *names: str) -> None:
        """Refuse arguments that must be the same for all examples."""
        for name in names:
            value = self.arguments.get(name)
            for each in value if isinstance(value, (tuple, list)) else [value]:
                if self.of(each) is not None:
                    raise NotProved(f"{name} of {self.name} depends on the examples")

    def broadcast(self, tensors: Iterable[Node], rank: int | None = None) -> Mark:
        """Return the mark of a combination of tensors entry by entry, broadcast against each other from the right."""
        known = list(tensors)
        rank = max(len(shape_of(t)) for t in known) if rank is None else rank
        found: Axis | None = None
        summed = False
        for tensor in known:
            mark = self.of(tensor)
            if isinstance(mark, Sum):
                summed = True
            elif mark is not None:
                moved = mark._replace(dim=mark.dim + rank - len(shape_of(tensor)))
                if found is not None and found != moved:
                    raise Mixes(f"{self.name} combines different examples")
                found = moved
        if found is None:
            return SUM if summed else None
        if summed:
            raise Mixes(f"{self.name} combines a sum over the examples with the examples")
        # A value without a mark has size 1 along the examples: `follow` refuses one with a size that counts them.
        return found


def _size_at(node: Node, dim: int, rank: int) -> int:
    """Return the size of a tensor along a dimension of the shape, of this rank, to which it is broadcast."""
    shape = shape_of(node)
    place = dim - (rank - len(shape))
    return shape[place] if place >= 0 else 1


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def follow(graph: torch.fx.Graph, given: dict[Node, Mark], count: int) -> tuple[dict[Node, Marks], list[Node]]:
    """Return the marks of all values of a graph, and the operations in which examples were first added up.

    The operations change nothing in place. `given` has the marks of placeholders; a missing one is None.

    Raises
    ------
    Mixes
        If an operation combines several examples, except by a sum that goes to parameters' gradients.
    NotProved
        If an operation has no rule, or is used in a way that its rule does not cover.
    """
    marks: dict[Node, Marks] = {}
    ends: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            marks[node] = given.get(node)
            if marks[node] is None and any(n and n % count == 0 for n in shape_of(node)):
                raise NotProved(f"a tensor that the model holds has a size that is a multiple of {count}")
        elif node.op == "call_function":
            try:
                marks[node] = _followed(node, marks, count)
            except NotProved as reason:
                raise reason.at(node) from None
            except Exception as cause:  # a rule that fails on its arguments proves nothing
                raise NotProved(f"{name_of(node.target)} is used in a way that its rule does not cover").at(
                    node
                ) from cause
            if holds_sum(marks[node]) and not any(holds_sum(marks[i]) for i in node.all_input_nodes):
                ends.append(node)
    return marks, ends


def holds_sum(mark: Marks) -> bool:
    """Whether a value, or one of several results, is a sum over the examples."""
    return mark is SUM or (isinstance(mark, list) and SUM in mark)


def _followed(node: Node, marks: dict[Node, Marks], count: int) -> Marks:
    if getattr(node.target, "__name__", "") == "getitem":
        several = marks[node.args[0]]  # type: ignore[index]
        return several[node.args[1]] if isinstance(several, list) else several  # type: ignore[index]
    op = Op(node, marks, count)
    # The number of examples must not enter a computation as a number: removing an example would change it.
    others = {name: value for name, value in op.arguments.items() if not is_size(op.name, name)}
    if counted_in(op, others.pop("groups", None)):
        raise NotProved(f"{op.name} with as many groups as there are examples")
    if counted_in(op, others):
        raise Mixes(f"{op.name} uses the number of examples")
    inputs = [marks[i] for i in node.all_input_nodes]
    result = _result(op, inputs)
    value = node.meta["val"]
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    for mark, value in zip(result if isinstance(result, list) else [result] * len(values), values, strict=True):
        if isinstance(value, torch.Tensor):
            _check_sizes(op, mark.axis if isinstance(mark, Places) else mark, value)
    every = [mark for each in (*inputs, result) for mark in (each if isinstance(each, list) else [each])]
    if all(mark in (None, SUM) for mark in every) and counted_in(op, op.arguments):
        raise Mixes(f"{op.name} uses the number of examples")
    return result


def _result(op: Op, inputs: Sequence[Marks]) -> Marks:
    if any(isinstance(mark, Places) for mark in inputs):
        return _placed(op)
    if all(mark is None for mark in inputs) and op.name not in CREATES:
        return None
    if op.name in ONE_NUMBER and all(mark is None or mark is SUM for mark in inputs):
        return None  # only the shape is read, and a sum has no dimension of examples
    if all(mark is None or mark is SUM for mark in inputs) and any(mark is SUM for mark in inputs):
        # `sources` applies the operations between sums and a parameter's gradient to each example's part.
        several = isinstance(op.node.meta["val"], (tuple, list))
        return [SUM] * len(op.node.meta["val"]) if several else SUM
    result = _rule_of(op)(op)
    # Of a tensor whose size alone is read, as in new_zeros, the mark does not matter.
    unasked = [node for node in op.node.all_input_nodes if node not in op.asked and op.marks[node] is not None]
    if unasked and op.name not in CREATES:
        raise NotProved(f"{op.name} has no rule for examples in all of its arguments")
    return result


def _rule_of(op: Op) -> Rule:
    known = RULES.get(op.name)
    if known is None and torch.Tag.pointwise in op.node.target.tags:  # type: ignore[union-attr]
        known = _pointwise
    if known is None:
        raise NotProved(f"{op.name} has no rule")
    return known


def _check_sizes(op: Op, mark: Mark, value: torch.Tensor) -> None:
    """Refuse a result with a size, other than that of the examples' dimension, that counts examples."""
    known = [d for d, size in enumerate(value.shape) if op.is_known(size)]
    if not isinstance(mark, Axis):
        if known:
            raise NotProved(
                f"{op.name} gives a size that counts examples, or is a multiple of {op.count}, where none lie"
            )
        return
    if value.shape[mark.dim] != mark.outer * op.count * mark.inner:
        raise NotProved(f"{op.name} gives examples where the proof does not expect them")
    if known != [mark.dim] or op.is_known(mark.outer) or op.is_known(mark.inner):
        raise NotProved(f"{op.name} gives one row for each pair of examples, or a size is a multiple of {op.count}")


def is_size(operation: str, argument: str) -> bool:
    """Whether an argument of an operation may be the number of examples."""
    return argument in SIZES or (argument == "stride" and operation.endswith("empty_strided"))


def counted_in(op: Op, tree: Any) -> bool:
    """Whether a number in a tree of arguments is made of the number of examples."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        return any(counted_in(op, each) for each in tree)
    if type(tree) is int:
        return tree != 0 and abs(tree) < 2**40 and tree % op.count == 0
    return type(tree) is float and abs(tree) in (op.count, 1 / op.count)


def _placed(op: Op) -> Marks:
    """Return the mark of a value made of the examples' places."""
    value = op.node.meta["val"]
    if op.name in _KEEP_PLACES and value.dtype in (torch.int32, torch.int64):
        given = {node: m.axis if isinstance(m, Places) else m for node, m in op.marks.items()}
        moved = Op(op.node, given, op.count)
        return Places(_rule_of(moved)(moved))
    if op.name.removeprefix("_unsafe_") in ("index", "index_put"):
        if any(isinstance(op.marks.get(op.arguments.get(name, op.node)), Places) for name in ("self", "values")):
            raise Mixes(f"{op.name} uses the examples' places in the batch")
        return _rule_of(op)(op)
    raise Mixes(f"{op.name} uses the examples' places in the batch")


_KEEP_PLACES = {
    "view", "_unsafe_view", "unsqueeze", "expand", "_to_copy", "clone", "detach", "alias", "lift_fresh_copy",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- entry by entry


def _pointwise(op: Op) -> Marks:
    for value in op.arguments.values():
        if isinstance(value, (tuple, list)) and any(isinstance(each, Node) for each in value):
            raise NotProved(f"{op.name} of a list of tensors")
    return op.broadcast(op.tensors(), len(op.out))


rule(
    "_to_copy", "copy", "fill", "detach", "alias", "lift_fresh", "lift_fresh_copy", "hardswish", "hardswish_backward",
    "hardsigmoid_backward", "hardtanh_backward", "elu_backward", "softplus_backward", "softshrink_backward",
    "hardshrink_backward", "leaky_relu_backward", "log_sigmoid_backward", "complex", "polar",
    "_conj", "_neg_view", "masked_fill", "_prelu_kernel", "rrelu_with_noise_backward",
    "nan_to_num", "erfinv",
    # Drawn independently for each entry.
    "bernoulli", "normal", "poisson", "rand_like", "randn_like", "randint_like", "exponential", "uniform", "geometric",
    "log_normal", "cauchy", "random", "normal_functional", "_standard_gamma", "binomial",
    *ONE_NUMBER,
)(_pointwise)  # fmt: skip


@rule("_prelu_kernel_backward", "log_sigmoid_forward", "native_dropout", "rrelu_with_noise_functional")
def _several(op: Op) -> Marks:
    """Several results, entry by entry; one without entries has no mark."""
    mark = _pointwise(op)
    return [mark if value.numel() else None for value in op.node.meta["val"]]


_SOUGHT = {
    "bucketize": ("self", ["boundaries"]),
    "isin": ("elements", ["test_elements"]),
    "searchsorted": ("self", ["sorted_sequence", "sorter"]),
}


@rule(*_SOUGHT)
def _found_in(op: Op) -> Marks:
    """Entry by entry; each entry is looked up among values that all examples share."""
    sought, among = _SOUGHT[op.name]
    op.no_examples(*among)
    if any(len(shape_of(node)) > 1 for node in op.tensors(*among)) and op.name == "searchsorted":
        raise NotProved(f"{op.name} in one sequence for each place in the batch")
    return op.mark(sought)


@rule("zeros", "ones", "full", "empty", "rand", "randn", "randint", "new_zeros", "new_ones", "new_full", "new_empty",
      "empty_strided", "new_empty_strided", creates=True)  # fmt: skip
def _created(op: Op) -> Marks:
    """One number everywhere, or one drawn for each entry: a row for each example where a size counts them."""
    return _new_rows(op, [d for d, size in enumerate(op.out) if op.is_known(size)])


def _new_rows(op: Op, found: Sequence[int]) -> Mark:
    """Return the mark of a result with new rows for the examples along these dimensions."""
    if len(found) > 1:
        raise NotProved(f"{op.name} gives one row for each pair of examples")
    return Axis(found[0], 1, op.out[found[0]] // op.count) if found else None


@rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss", "mse_loss_backward",
      "smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward", "soft_margin_loss_backward")  # fmt: skip
def _loss(op: Op) -> Marks:
    if op["reduction"] != 0:
        raise Mixes(f"{op.name} reduces over the examples")
    return _pointwise(op)


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward")
def _nll(op: Op) -> Marks:
    op.no_examples("weight")
    if op["reduction"] != 0:
        raise Mixes(f"{op.name} reduces over the examples")
    backward = "grad_output" in op.arguments
    mark = op.mark("self")
    others = {op.mark(name) for name in ("target", "grad_output")[: 1 + backward]}
    if not isinstance(mark, Axis) or mark.dim or others != {mark}:
        raise NotProved(f"{op.name} of examples along another dimension than the first")
    return mark if backward else [mark, None]


# ---------------------------------------------------------------------------------------------- other shapes


@rule("view", "_unsafe_view")
def _view(op: Op) -> Marks:
    """The same entries in the same order.

    With P groups of entries before the examples and Q entries after them the flat place of example i is
    ``(p B + i) Q + q``. It must be that of one dimension of the result, for its own outer and inner sizes.
    """
    mark = op.mark("self")
    assert isinstance(mark, Axis)
    shape = shape_of(op["self"])
    before, after = math.prod(shape[: mark.dim]) * mark.outer, math.prod(shape[mark.dim + 1 :]) * mark.inner
    start = 1
    for dim, size in enumerate(op.out):
        rest = math.prod(op.out[dim + 1 :])
        if before % start == 0 and after % rest == 0 and size == (before // start) * op.count * (after // rest):
            return Axis(dim, before // start, after // rest)
        start *= size
    raise NotProved(f"{op.name} from {shape} to {op.out} gives the examples no dimension")


@rule("t", "transpose", "permute")
def _permuted(op: Op) -> Marks:
    mark = op.mark("self")
    assert isinstance(mark, Axis)
    return mark._replace(dim=order_of(op.node).index(mark.dim))


def order_of(node: Node) -> list[int]:
    """Return, for each dimension of a transposed value, the argument's dimension that it was."""
    given: Any = node.args[1:]
    rank = len(shape_of(node))
    order = list(range(rank))
    if name_of(node.target) == "permute":
        return [d % rank for d in given[0]]
    first, second = (d % rank for d in (given or (0, min(rank, 2) - 1)))
    order[first], order[second] = order[second], order[first]
    return order


@rule("unsqueeze", "select_backward")
def _unsqueezed(op: Op) -> Marks:
    return _beside(op.of(op.tensors()[0]), op["dim"] % len(op.out))


@rule("squeeze")
def _squeezed(op: Op) -> Marks:
    return _without(op.mark("self"), squeezed(op.node))


def squeezed(node: Node) -> list[int]:
    """Return the dimensions that a squeeze removes."""
    shape, given = shape_of(node.args[0]), node.args[1] if len(node.args) > 1 else None
    dims = [] if given == [] else _dimensions(given, len(shape))  # an empty list means no dimension here, not all
    return [d for d in dims if shape[d : d + 1] == (1,)]


@rule("expand", creates=True)
def _expanded(op: Op) -> Marks:
    mark, shape = op.mark("self"), shape_of(op["self"])
    new = len(op.out) - len(shape)
    if isinstance(mark, Axis):
        return mark._replace(dim=mark.dim + new)
    return _new_rows(op, [d for d, n in enumerate(op.out) if op.is_known(n) and (d < new or shape[d - new] == 1)])


@rule("repeat", creates=True)
def _repeated(op: Op) -> Marks:
    mark, shape, times = op.mark("self"), shape_of(op["self"]), list(op["repeats"])
    new = len(times) - len(shape)
    if isinstance(mark, Axis):
        dim = mark.dim + new
        return Axis(dim, mark.outer * times[dim], mark.inner)
    return _new_rows(op, [d for d, n in enumerate(times) if op.is_known(n)])


_APART = {
    "select", "slice", "slice_copy", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind",
    "split_copy", "split_with_sizes_copy", "select_backward", "slice_backward",
}  # fmt: skip
"""Operations that take some examples out of the batch; the code may still treat each one alone."""


def _along(op: Op, dims: Any, nodes: Sequence[Node] | None = None) -> Marks:
    """Return the mark of an operation that runs along some dimensions, none the examples', and else entry by entry."""
    nodes = [op["self"]] if nodes is None else nodes
    mark, rank = op.broadcast(nodes), max(len(shape_of(node)) for node in nodes)
    if isinstance(mark, Axis) and mark.dim in _dimensions(dims, rank):
        if op.name in _APART:
            raise NotProved(f"{op.name} takes the examples apart")
        raise Mixes(f"{op.name} runs over the examples")
    return mark


def _dimensions(given: Any, rank: int) -> list[int]:
    """Return dimensions, given as none for all, as one or as several."""
    chosen = given if isinstance(given, (tuple, list)) else [] if given is None else [given]
    return [d % max(rank, 1) for d in chosen or range(rank)]


def _without(mark: Mark, gone: Sequence[int]) -> Mark:
    """Return the mark without these dimensions; none of them is the examples'."""
    return mark._replace(dim=mark.dim - sum(d < mark.dim for d in gone)) if isinstance(mark, Axis) else mark


def _beside(mark: Mark, new: int) -> Mark:
    """Return the mark after a dimension was inserted; it has this number in the result."""
    return mark._replace(dim=mark.dim + (new <= mark.dim)) if isinstance(mark, Axis) else mark


@rule("select", "diagonal", "diagonal_copy")
def _chosen_of_dimensions(op: Op) -> Marks:
    dims = op["dim"] if op.name == "select" else [op["dim1"], op["dim2"]]
    return _without(_along(op, dims), _dimensions(dims, op.rank("self")))


@rule("slice", "slice_copy")
def _sliced(op: Op) -> Marks:
    if _is_all(op, "self"):
        return op.mark("self")
    if op["start"] in (0, None) and op["end"] == 1 and _is_repeated(op["self"], op):
        return None  # the first of rows that are all the same
    return _along(op, op["dim"])


def _is_repeated(node: Node, op: Op) -> bool:
    """Whether the examples' rows are one value without examples, as often as there are examples."""
    if node.op != "call_function" or name_of(node.target) != "expand":
        return False
    mark = op.of(node)
    return isinstance(mark, Axis) and mark.dim == op["dim"] % op.rank("self") and op.of(node.args[0]) is None


def _is_all(op: Op, name: str) -> bool:
    """Whether a slice takes all examples, for any number of them."""
    mark, end, dim = op.mark(name), op["end"], op["dim"] % len(op.out)
    if not isinstance(mark, Axis) or mark.dim != dim:
        if counted_in(op, end):
            raise Mixes(f"{op.name} uses the number of examples")
        return False
    every = end is None or end >= 2**40 or end == shape_of(op[name])[dim]
    return every and op["start"] in (None, 0) and op["step"] == 1


@rule("slice_backward")
def _sliced_backward(op: Op) -> Marks:
    return op.mark("grad_output") if _is_all(op, "grad_output") else _along(op, op["dim"], [op["grad_output"]])


@rule("slice_scatter", "select_scatter")
def _scattered_part(op: Op) -> Marks:
    whole, part, dim = op.mark("self"), op.mark("src"), op["dim"] % len(op.out)
    if op.name == "slice_scatter" and _is_all(op, "src"):
        return part
    if op.name == "select_scatter":
        part = _beside(part, dim)
    return _joined_marks(op, [whole, part], dim)


def _joined_marks(op: Op, pieces: Sequence[Mark], dim: int) -> Marks:
    """Return the mark of pieces side by side along `dim`; a piece without examples must not depend on their places."""
    found = set(pieces) - {None}
    if len(found) != 1:
        raise Mixes(f"{op.name} joins different examples")
    (mark,) = found
    assert isinstance(mark, Axis)
    if mark.dim == dim:
        raise NotProved(f"{op.name} joins or leaves out examples")
    if None in pieces:
        raise NotProved(f"{op.name} joins examples and a value that depends on their places in the batch")
    return mark


@rule("cat", "stack")
def _joined(op: Op) -> Marks:
    dim = op["dim"] % len(op.out)
    pieces = [op.of(node) for node in op["tensors"] if shape_of(node) != (0,)]
    if op.name == "stack":
        pieces = [_beside(mark, dim) for mark in pieces]
    if SUM in pieces:
        raise Mixes(f"{op.name} joins a sum over the examples with the examples")
    return _joined_marks(op, pieces, dim)


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind", "split_copy", "split_with_sizes_copy")  # fmt: skip
def _split(op: Op) -> Marks:
    mark = op.mark("self")
    sizes = op.arguments.get("split_sizes", op.arguments.get("split_size"))
    if isinstance(mark, Axis) and mark.dim == op["dim"] % op.rank("self"):
        if sizes in (shape_of(op["self"])[mark.dim], [shape_of(op["self"])[mark.dim]]):
            return mark
    elif counted_in(op, sizes):
        raise Mixes(f"{op.name} uses the number of examples")
    mark = _along(op, op["dim"])
    return _without(mark, [op["dim"] % op.rank("self")]) if op.name == "unbind" else mark


@rule("diagonal_backward")
def _diagonal_backward(op: Op) -> Marks:
    mark, rank = _along(op, -1, [op["grad_output"]]), len(op.out)
    assert isinstance(mark, Axis)
    kept = [d for d in range(rank) if d not in (op["dim1"] % rank, op["dim2"] % rank)]
    return mark._replace(dim=kept[mark.dim])


@rule("constant_pad_nd")
def _padded(op: Op) -> Marks:
    rank = op.rank("self")
    padded = [rank - 1 - k // 2 for k, width in enumerate(op["pad"]) if width]
    return _along(op, padded) if padded else op.mark("self")


# ---------------------------------------------------------------------------------------------- along dimensions


@rule("sum", "nansum")
def _summed(op: Op) -> Marks:
    """The only reduction that may run over the examples: it adds up their parts."""
    mark, chosen = op.mark("self"), _dimensions(op.arguments.get("dim"), op.rank("self"))
    assert isinstance(mark, Axis)
    if mark.dim in chosen:
        if op.name == "nansum":
            raise Mixes(f"{op.name} runs over the examples")
        return SUM
    return mark if op.arguments.get("keepdim") else _without(mark, chosen)


@rule("mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "prod", "any", "all", "logsumexp", "argmax", "argmin",
      "max", "min", "median", "nanmedian", "mode", "kthvalue", "count_nonzero", "linalg_vector_norm", "norm", "aminmax")  # fmt: skip
def _reduced(op: Op) -> Marks:
    if len(op.tensors()) > 1:  # maximum and minimum of two tensors
        return _pointwise(op)
    dims = op.arguments.get("dim")
    mark, rank = _along(op, dims), op.rank("self")
    return _without(mark, _dimensions(dims, rank)) if len(op.out) < rank else mark


_ALONG: dict[str, Callable[[Op], Any]] = {
    "_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin sort topk glu "
    "_softmax_backward_data _log_softmax_backward_data glu_backward": lambda op: op["dim"],
    "flip roll unfold _fft_r2c _fft_c2r _fft_c2c": lambda op: next(
        op[name] for name in ("dim", "dims", "dimension") if name in op.arguments
    ),
    "unfold_backward": lambda op: [op["dim"] % len(op.out), -1],
    # A distribution over the last dimension, or pairs of numbers in it.
    "multinomial _sample_dirichlet _dirichlet_grad view_as_complex": lambda _: -1,
    # Each matrix alone. Eigenvectors, singular vectors, QR, LU and ranks have no rule: rounding may decide them, and
    # rounding may depend on the number of rows.
    "tril triu _linalg_det _linalg_slogdet linalg_inv_ex linalg_cholesky_ex linalg_matrix_exp linalg_solve_triangular "
    "_cdist_forward _cdist_backward": lambda _: [-1, -2],
}
"""The dimensions that operations run along; along the others they go entry by entry."""

for _names, _dims in _ALONG.items():
    rule(*_names.split())(lambda op, dims=_dims: _along(op, dims(op), op.tensors()))  # type: ignore[misc]
rule("view_as_real")(lambda op: op.mark("self"))


# ---------------------------------------------------------------------------------------------- products


@rule("mm", "addmm", "bmm", "baddbmm")
def _product(op: Op) -> Marks:
    """``left[free, inner] right[inner, free]``, each of a batch alone for "bmm"."""
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}.get(op.name, ("self", "mat2"))
    left, right = (op.mark(name) for name in names)
    if isinstance(left, Sum) or isinstance(right, Sum):
        raise Mixes(f"{op.name} combines a sum over the examples with the examples")
    first, own = op.rank(names[0]) - 2, [mark for mark in (left, right) if mark is not None]
    if not own:
        raise NotProved(f"{op.name} adds the examples to a product without examples")
    in_left, in_right = left is not None and left.dim == first + 1, right is not None and right.dim == first
    mark: Marks = own[0]
    if first and any(each.dim == 0 for each in own):
        if len(own) < 2:
            raise Mixes(f"{op.name} combines the examples with a value that depends on their places in the batch")
        if left != right:
            raise Mixes(f"{op.name} multiplies different examples")
    elif in_left and in_right:
        if own[0][1:] != own[1][1:]:
            raise Mixes(f"{op.name} multiplies different examples")
        mark = SUM
    elif in_left or in_right:
        raise Mixes(f"{op.name} adds up examples that are weighted by their places in the batch or by other examples")
    elif len(own) == 2:
        raise Mixes(f"{op.name} multiplies each example with every other one")
    return _with_addend(op, mark) if op.name.startswith(("add", "badd")) else mark


def _with_addend(op: Op, mark: Marks) -> Marks:
    addend = op.mark("self")
    if addend is None:
        if isinstance(mark, Axis) and _size_at(op["self"], mark.dim, len(op.out)) != 1:
            raise Mixes(f"{op.name} combines the examples with a value that depends on their places in the batch")
        return mark
    if mark is SUM or addend is SUM:
        raise Mixes(f"{op.name} combines a sum over the examples with the examples")
    if addend._replace(dim=addend.dim + len(op.out) - op.rank("self")) != mark:  # type: ignore[union-attr]
        raise Mixes(f"{op.name} combines different examples")
    return mark


@rule("mv", "dot", "vdot", "addmv")
def _vector_product(op: Op) -> Marks:
    left, right = (op.of(node) for node in op.tensors()[-2:])
    plain = isinstance(left, Axis) and left.dim == 0 and right is None
    if op.name == "addmv" and not (plain and op.mark("self") is None and op.rank("self") == 0):
        raise NotProved(f"{op.name} has no rule for this use")
    if isinstance(left, Axis):
        if op.name.endswith("mv") and plain:
            return left
        if right == (left if op.name.endswith("dot") else left._replace(dim=left.dim - 1)):
            return SUM
    raise Mixes(f"{op.name} multiplies different examples")


# ---------------------------------------------------------------------------------------------- layers


def _layer(names: str, free: Callable[[Op], slice], own: str = "", shared: str = "", *, sums: bool = False) -> None:
    """Register the rule of operations that treat each example alone.

    The arguments `own`, by default all tensors that are not `shared`, have the examples along the same one of their
    `free` dimensions. With `sums` all results except the first are sums of the examples' parts.
    """

    def alone(op: Op) -> Marks:
        op.no_examples(*shared.split())
        others = {id(op.arguments.get(name)) for name in shared.split()}
        chosen = [name for name in own.split() if name in op.arguments]
        nodes = op.tensors(*chosen) if own else [node for node in op.tensors() if id(node) not in others]
        marks = {op.of(node) for node in nodes}
        (mark,) = marks if len(marks) == 1 else (None,)
        if not isinstance(mark, Axis) or mark.dim not in range(len(shape_of(nodes[0])))[free(op)]:
            raise Mixes(f"{op.name} combines different examples")
        return [mark, *[SUM] * (len(op.node.meta["val"]) - 1)] if sums else mark

    rule(*names.split())(alone)


def _first(_: Op) -> slice:
    return slice(1)


def _not_normalized(op: Op) -> slice:
    return slice(-len(op["normalized_shape"]))


_layer("convolution _convolution", _first, "input", "weight bias")
_layer("convolution_backward", _first, "grad_output input", "weight", sums=True)
_layer("native_group_norm", _first, "input", "weight bias")
_layer("native_group_norm_backward", _first, "grad_out input mean rstd", "weight", sums=True)
_layer("native_layer_norm _fused_rms_norm", _not_normalized, "input", "weight bias")
_layer("native_layer_norm_backward _fused_rms_norm_backward", _not_normalized, "grad_out input mean rstd", "weight bias",
       sums=True)  # fmt: skip
_layer("channel_shuffle", _first)  # the channels are dimension 1, however many there are
_layer("grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward", _first)
# All tensors but weights are (times or states, examples, width).
_layer("dpcore::recurrence dpcore::recurrence_backward", lambda _: slice(1, 2), "", "weight bias")

_layer("dpcore::head dpcore::head_inputs", _first, "", "weight bias")


@rule("dpcore::head_weight", "dpcore::head_bias")
def _of_head(op: Op) -> Marks:
    """A sum of the rows' parts; each part is made of one row of every other argument."""
    return SUM if isinstance(RULES["dpcore::head"](op), Axis) else None


_SPATIAL = {
    1: "upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d "
    "reflection_pad1d replication_pad1d",
    2: "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_max_pool2d fractional_max_pool2d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa reflection_pad2d replication_pad2d",
    3: "avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_max_pool3d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_trilinear3d reflection_pad3d replication_pad3d",
}  # fmt: skip
"""Operations on the last dimensions, as many as the key; each has one that goes back."""

for _last, _names in [
    *((last, " ".join(f"{name} {name}_backward" for name in names.split())) for last, names in _SPATIAL.items()),
    (2, "col2im max_unpool2d"), (3, "max_unpool3d im2col pixel_shuffle pixel_unshuffle"),
]:  # fmt: skip
    _layer(_names, lambda _, last=_last: slice(-last))  # type: ignore[misc]


@rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_native_batch_norm_legit_no_training",
      "_native_batch_norm_legit_functional", "_batch_norm_no_update", "_batch_norm_with_update",
      "_batch_norm_with_update_functional",
      "native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")  # fmt: skip
def _batch_norm(op: Op) -> Marks:
    """Channel by channel with given statistics; with its own only if the examples are channels (instance norm)."""
    mark, given, results = op.mark("input"), op.arguments.get, op.node.meta["val"]
    gradient = given("grad_out", given("grad_output"))
    if gradient is not None and op.of(gradient) != mark:
        raise Mixes(f"{op.name} combines different examples")
    others = [node for name, node in op.arguments.items() if name != "reserve" and node not in (gradient, op["input"])]
    if isinstance(mark, Axis) and mark.dim == 1:
        own = mark._replace(dim=0)
        allowed = (own,) if gradient is None else (None, own)
        if any(op.of(node) not in allowed for node in others if isinstance(node, Node)):
            raise Mixes(f"{op.name} combines different examples")
        return [mark, *(own if gradient is not None or value.numel() else None for value in results[1:])]
    if gradient is None:
        trains = given("training", op.name.startswith("_batch_norm_with_update"))
    else:
        trains = given("train", True) is not False and given("update", True) is not False
    if trains:
        raise Mixes(f"{op.name} takes statistics over the examples of a batch")
    op.no_examples(*("weight", "bias", "running_mean", "running_var")[: 4 if gradient is None else 1])
    if not isinstance(mark, Axis) or mark.dim:
        raise Mixes(f"{op.name} takes examples along another dimension than the first")
    return [mark, *[None if gradient is None else SUM] * (len(results) - 1)]


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
      "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward",
      "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward")  # fmt: skip
def _attention(op: Op) -> Marks:
    """Each entry of the first dimension alone."""
    shared = {"philox_seed", "philox_offset", "cum_seq_q", "cum_seq_k"}
    found = set()
    for name, value in op.arguments.items():
        if not isinstance(value, Node) or name in shared or not _is_tensor(value):
            continue
        mark = op.of(value)
        if mark is None and name in ("attn_mask", "attn_bias"):
            if len(shape_of(value)) > 3 and shape_of(value)[0] != 1:
                raise Mixes(f"{op.name} combines the examples with a mask that depends on their places in the batch")
        else:
            found.add(mark)
    (mark,) = found if len(found) == 1 else (None,)
    if not isinstance(mark, Axis) or mark.dim:
        raise Mixes(f"{op.name} combines different examples")
    bias = op.arguments.get("attn_bias")
    if bias is not None and op.of(bias) is None and op.arguments.get("grad_input_mask", [False])[-1]:
        raise NotProved(f"{op.name} adds up the examples' gradients of a bias")
    return [mark if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == mark.outer * op.count * mark.inner else None
            for v in op.node.meta["val"]]  # fmt: skip


# ---------------------------------------------------------------------------------------------- by index


@rule("embedding")
def _looked_up(op: Op) -> Marks:
    op.no_examples("weight")
    return op.mark("indices")


@rule("embedding_dense_backward")
def _looked_up_backward(op: Op) -> Marks:
    if op["scale_grad_by_freq"]:
        raise Mixes("embedding_dense_backward divides by how often all examples hold a token")
    mark = op.mark("indices")
    if op.mark("grad_output") != mark or not isinstance(mark, Axis):
        raise Mixes(f"{op.name} combines different examples")
    return SUM


@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _gathered(op: Op) -> Marks:
    if op.mark("self") is None and isinstance(op.mark("index"), Axis):
        raise NotProved(f"{op.name} of values that all examples share")
    mark = op.broadcast(op.tensors(), len(op.out))
    if isinstance(mark, Axis):
        if mark.dim == op["dim"] % len(op.out):
            raise Mixes(f"{op.name} runs over the examples")
        if any(op.of(node) is None for node in op.tensors()):
            raise NotProved(f"{op.name} of examples and a value that depends on their places in the batch")
    return mark


@rule("index_select")
def _chosen(op: Op) -> Marks:
    mark, which, dim = op.mark("self"), op.mark("index"), op["dim"] % max(op.rank("self"), 1)
    if which is None:
        return _along(op, dim)
    if mark is None and isinstance(which, Axis):
        return which._replace(dim=dim)
    raise Mixes("index_select chooses among the examples")


@rule("index_add")
def _added_at(op: Op) -> Marks:
    whole, which, part, dim = op.mark("self"), op.mark("index"), op.mark("source"), op["dim"] % max(op.rank("self"), 1)
    if whole is None and isinstance(which, Axis) and part == which._replace(dim=dim):
        return SUM
    if which is None and whole == part and isinstance(whole, Axis) and whole.dim != dim:
        return whole
    raise Mixes("index_add adds up different examples")


@rule("index", "_unsafe_index")
def _indexed(op: Op) -> Marks:
    return _index_mark(op, op.mark("self"), op.rank("self"))[0]


@rule("index_put", "_unsafe_index_put")
def _put(op: Op) -> Marks:
    whole, values = op.mark("self"), op.mark("values")
    given = [index for index in op["indices"] if index is not None]
    masks = len(given) == len(op["indices"]) == 1 and given[0].meta["val"].dtype is torch.bool
    if masks and values is None and math.prod(shape_of(op["values"])) == 1 and not op["accumulate"]:
        # ``self[mask] = number``: entry by entry; the mask's dimensions are the first ones of `self`.
        if not isinstance(whole, Axis) or op.of(given[0]) != (whole if whole.dim < len(shape_of(given[0])) else None):
            raise Mixes(f"{op.name} fills the examples by a mask that is not their own")
        return whole
    mark, rank, is_sum = _index_mark(op, whole, op.rank("self"), writes=True)
    if is_sum and not op["accumulate"]:
        raise Mixes("index_put writes different examples to one place")
    if values is not None:
        if values._replace(dim=values.dim + rank - op.rank("values")) != mark:  # type: ignore[union-attr]
            raise Mixes("index_put combines different examples")
    elif not is_sum and _size_at(op["values"], mark.dim, rank) != 1:
        raise Mixes("index_put combines the examples with a value that depends on their places in the batch")
    return SUM if is_sum else whole


def _index_mark(op: Op, whole: Mark, rank: int, writes: bool = False) -> tuple[Axis, int, bool]:
    """Return the mark of ``self[indices]``, its rank, and whether writing there would add examples up.

    Indices that are tensors are broadcast against each other; their dimensions take the place of the first of them, or
    come first if other indices lie between them.
    """
    indices = list(op["indices"]) + [None] * (rank - len(op["indices"]))
    if any(i is not None and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices):
        raise NotProved("an index is a mask")
    given = [d for d, index in enumerate(indices) if index is not None]
    tensors = [indices[d] for d in given]
    wide = max(len(shape_of(t)) for t in tensors)
    together = given == list(range(given[0], given[-1] + 1))
    start = given[0] if together else 0
    kept = [d for d in range(rank) if indices[d] is None]
    before = sum(d < given[0] for d in kept) if together else 0
    out_rank = wide + len(kept)
    own = [t for t in tensors if isinstance(op.marks.get(t), Places)]
    others = [t for t in tensors if t not in own]
    among = op.broadcast(others, wide) if others else None
    if isinstance(whole, Axis) and indices[whole.dim] is not None:
        # Each example's own row: index i at example i.
        index = indices[whole.dim]
        places = op.marks.get(index)
        if own != [index] or (whole.outer, whole.inner) != (1, 1) or not isinstance(places, Places):
            raise Mixes(f"{op.name} chooses among the examples")
        if (places.axis.outer, places.axis.inner) != (1, 1):
            raise Mixes(f"{op.name} chooses among the examples")
        dim = wide - len(shape_of(index)) + places.axis.dim
        if among not in (None, Axis(dim)):
            raise Mixes(f"{op.name} combines different examples")
        if among is None and any(_size_at(t, dim, wide) != 1 for t in others):
            raise Mixes(f"{op.name} combines the examples with places in the batch")
        return Axis(start + dim), out_rank, False
    if own:
        raise Mixes(f"{op.name} takes places in the batch as an index")
    if among is SUM or whole is SUM:
        raise Mixes(f"{op.name} combines a sum over the examples with the examples")
    if isinstance(whole, Axis):
        if among is not None:
            raise Mixes(f"{op.name} combines each example with every other one")
        place = kept.index(whole.dim)
        return whole._replace(dim=place + (wide if place >= before else 0)), out_rank, False
    assert isinstance(among, Axis) or writes
    if among is None:  # constants that examples are written to
        raise NotProved(f"{op.name} writes examples into a value without examples")
    return among._replace(dim=among.dim + start), out_rank, writes  # type: ignore[union-attr]


@rule("arange", creates=True)
def _counted(op: Op) -> Marks:
    start, end, step = op.arguments.get("start") or 0, op["end"], op.arguments.get("step", 1)
    if not counted_in(op, op.arguments):
        return None
    if start != 0 or step != 1 or end != op.count or op.node.meta["val"].dtype not in (torch.int32, torch.int64):
        raise Mixes("arange uses the number of examples")
    return Places(Axis(0))
