"""Training of a fully_shard model: its graph, which gathers each layer, and the processes with its shards.

Each process has some rows of every parameter and of the run's other vectors. The graph takes these rows. Before the
operations that read a layer's parameters, one operation gathers them from all processes. They are freed when another
layer is gathered. A layer whose parameters fully_shard would keep after its forward pass
(``reshard_after_forward=False``, and the root) is gathered once. No gradient of a parameter is formed, so none leaves a
process.

Notes
-----
Why sensitivity and noise are those of one process. Each example is in one process, which has its whole vector, scales
it by its own norm, and adds it to a float64 vector of the tensor, in whole steps of the release's grid. The
reduce-scatter adds these vectors over all processes. So every coordinate of the sum is the sum of the clipped vectors
of the whole batch, each once, and integers have the same sum in any order (`dpcore.spec.contributions`). A process
without examples adds zeros, never the result of its synthetic batch. The noise of a coordinate follows from its element
of the stream, and its one owner draws it once (`Layout.rows` cuts each tensor into disjoint pieces that cover it).

All processes must run the graph equally often, since each gathering waits for all. The graph determines the order in
which layers are gathered, and two processes with different graphs would join the shards of different layers: a step's
messages are compared before it is released. Nothing is released before all have agreed that the sum is complete. A
process that fails in a step is out of step with the others: it takes part in no later message, and the others end by
the group's timeout.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import Shard
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.mechanism.peers import LOST
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import Backend
from dpcore.stages.clipping.blocks import Block
from dpcore.stages.clipping.clipped_sum import add_sums
from dpcore.stages.method import Method
from dpcore.torch import processes
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree, trial_batch
from dpcore.torch.gradients.capture import Captured
from dpcore.torch.gradients.per_example import Loss, PerExampleGradient
from dpcore.torch.gradients.proved import Gathers
from dpcore.torch.model.functional import Values, local, slots
from dpcore.torch.processes import Processes

Note = Callable[[str], None]
"""Called with each message, so that processes can compare their order."""


class ShardedGradient(PerExampleGradient):
    """See `PerExampleGradient`. The blocks are those of whole gradients, of this process's examples only.

    `note` is called at each gathering.
    """

    free = False

    def __init__(self, model: Any, loss: Loss, note: Note) -> None:
        self._note_of_messages = note
        super().__init__(model, loss)
        assert isinstance(self.values, ShardedValues)
        self.passed_over += self.values.held

    def _values(self) -> Values:
        return ShardedValues(self.model, self.names, self._note_of_messages)

    def _gradients(
        self, point: Sequence[Any], batch: Tree, seed: bytes, synthetic: bool, regular: Hashable = None
    ) -> list[Block]:
        if batches.size(batch) == 0:
            # The other processes have examples, and wait for this one's shards.
            super()._gradients(point, trial_batch(self.example, 1), seed, True)
        return super()._gradients(point, batch, seed, synthetic)


class ShardedValues(Values):
    """See `Values`: this process's rows of each parameter. `held` are fully_shard's own objects."""

    def __init__(self, model: nn.Module, names: Sequence[str], note: Note) -> None:
        super().__init__(model, names)
        self._note = note
        root: Any = model
        root._get_fsdp_state()._lazy_init()  # so that its hooks are there before the model is looked at
        self._reset = root.reset_iter_state
        for module in sharded_modules(model):
            module.reshard()
        self._states, self._groups = groups_of(model)
        named = dict(model.named_parameters())
        self._shards = [named[name] for name in self.names]
        known = [each for group in self._groups for each in group.fsdp_params]
        self.held = [*self._states, *self._groups, *known, *model.parameters()]

    def parameters(self) -> list[torch.Tensor]:
        """Return this process's rows of each parameter."""
        return [local(shard) for shard in self._shards]

    def settle(self) -> None:
        """Free parameters that a call of the model gathered, as in an evaluation."""
        self._reset()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Remove fully_shard's hooks inside the block, so that the graph is captured with whole parameters."""
        self.settle()
        taken: list[tuple[Any, int, Any]] = []
        try:
            for module in self.model.modules():
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    for number, hook in list(hooks.items()):
                        if any(getattr(hook, "__self__", None) is state for state in self._states):
                            taken.append((hooks, number, hooks.pop(number)))
            yield
        finally:
            for hooks, number, hook in taken:
                hooks[number] = hook

    def gathered(self, captured: Captured) -> Gathers:
        """Return the function that inserts the gathering of each layer into the graph."""
        numbers = {
            id(t): n for n, group in enumerate(self._groups) for t in (p.sharded_param for p in group.fsdp_params)
        }
        named = dict(slots(self.model))
        taken = [numbers.get(id(named[name])) for name in (*self.names, *captured.held)]

        def put(graph: Graph, places: list[Node]) -> None:
            layers: dict[int, Layer] = {}
            for number in dict.fromkeys(n for n in taken if n is not None):
                group = self._groups[number]
                members = [p for p, n in zip(places, taken, strict=False) if n == number and p.users]
                rows = [p.meta["val"].shape for p in members]
                lasting = group.post_forward_mesh_info is None
                layers[number] = Layer(number, members, rows, lasting, group.mesh_info.mesh.get_group(), self._note)
            put_gathers(graph, layers)

        return put


class Layer:
    """Parameters that are gathered together: placeholders of the graph, with the shapes of whole parameters."""

    def __init__(
        self, number: int, members: list[Node], shapes: list[torch.Size], lasting: bool, group: Any, note: Note
    ) -> None:
        self.number, self.members, self.lasting = number, members, lasting
        self.__name__ = f"gather_layer_{number}"
        self._shapes, self._group, self._note = shapes, group, note

    def __call__(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole parameters. A process sends ceil(n / world size) rows of each, padded at the end."""
        world = dist.get_world_size(self._group)
        gathered: list[torch.Tensor | None] = [None] * len(rows)
        self._note(self.__name__)
        for kind in dict.fromkeys(row.dtype for row in rows):
            places = [place for place, row in enumerate(rows) if row.dtype == kind]
            sizes = [-(-self._shapes[place][0] // world) * self._shapes[place][1:].numel() for place in places]
            own = rows[0].new_zeros(sum(sizes), dtype=kind)
            for part, place in zip(torch.split(own, sizes), places, strict=True):
                part[: rows[place].numel()] = rows[place].reshape(-1)
            every = own.new_empty(world * len(own))
            try:
                processes.all_gather(every, own, self._group)
            except RuntimeError as cause:  # torch.distributed raises it when a process is gone
                raise PrivacyError(LOST) from cause
            for part, place in zip(torch.split(every.view(world, -1), sizes, 1), places, strict=True):
                shape = self._shapes[place]
                gathered[place] = part.reshape(-1, *shape[1:])[: shape[0]]
        return gathered  # type: ignore[return-value]


def put_gathers(graph: Graph, layers: dict[int, Layer]) -> None:
    """Make operations use gathered parameters instead of placeholders, which are some rows of each."""
    of = {place: number for number, layer in layers.items() for place in layer.members}
    viewed: dict[Node, Node] = {}  # views of a parameter, which are made again where they are used
    there: dict[int, dict[Node, Node]] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "output"):
            continue
        taken = [i for i in node.all_input_nodes if i in of or i in viewed]
        if not taken:
            continue
        if node.op == "call_function" and getattr(node.target, "is_view", False) and len(taken) == 1:
            viewed[node] = viewed.get(taken[0], taken[0])
            continue
        needed = list(dict.fromkeys(of[viewed.get(i, i)] for i in taken))
        for gone in [n for n in there if n not in needed and not layers[n].lasting]:
            del there[gone]
        with graph.inserting_before(node):
            for number in needed:
                if number not in there:
                    whole = graph.call_function(layers[number], tuple(layers[number].members))
                    there[number] = {
                        place: graph.call_function(operator.getitem, (whole, k))
                        for k, place in enumerate(layers[number].members)
                    }

            def whole_of(value: Node) -> Node:
                if value in viewed:
                    given = there[of[viewed[value]]]
                    if value not in given:
                        given[value] = graph.node_copy(value, whole_of)
                    return given[value]
                return there[of[value]][value] if value in of else value

            # Copies of views must precede the node: they are made first.
            copies = {i: whole_of(i) for i in taken}
        node.args = map_arg(node.args, lambda n: copies.get(n, n))  # noqa: B023
        node.kwargs = map_arg(node.kwargs, lambda n: copies.get(n, n))  # noqa: B023
    graph.eliminate_dead_code()


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that fully_shard was applied to."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def groups_of(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return fully_shard's states for the model's modules, and the groups of parameters that it gathers together."""
    states = {id(state): state for state in (module._get_fsdp_state() for module in sharded_modules(model))}
    return list(states.values()), [group for state in states.values() for group in state._fsdp_param_groups]


class Sharded(Processes):
    """See `dpcore.mechanism.peers.Peers`. A process owns some rows of each tensor and stores no others.

    Notes
    -----
    A step sends each tensor's sum once per micro-batch, by a reduce-scatter, and no updated parameters.
    """

    shards = True

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._added: list[tuple[Sequence[Block], Sequence[Any], Sequence[float] | None]] = []
        self._begun = False  # whether a step has begun and its sum is not complete
        self._order = hashlib.sha256()

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """See `Peers.pieces`."""
        return layout.rows(self.rank, self.world_size)

    def totals(self, like: Sequence[Any], backend: Backend[Any]) -> list[Any]:
        """See `Peers.totals`. They cover this process's own pieces."""
        totals = [backend.zeros_like(vector, "float64") for vector in like]
        self._sum = processes.as_tensor(totals[0])[:0]
        return totals

    def rounds(self, count: int) -> int:
        """See `Peers.rounds`: the largest number of micro-batches of any process."""
        most = torch.tensor(count, device=self._sum.device)
        with self._lost():
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        self._begun = True
        self._order = hashlib.sha256()
        return int(most)

    def note(self, message: str) -> None:
        """Note a message of a step. All processes must send the same messages in the same order."""
        self._order.update(f"{message}\n".encode())

    def add_sums(
        self,
        backend: Backend[Any],
        blocks: Sequence[Block],
        weights: Sequence[Any],
        totals: Sequence[Any],
        scales: Sequence[Any],
        longest: Sequence[float] | None = None,
        overwrite: bool = False,
    ) -> None:
        """See `Peers.add_sums`. The sums wait for `join`, so that all processes join equally often."""
        self._added.append((blocks, weights, longest))

    def join(self, totals: Sequence[Any], layout: Layout, backend: Backend[Any]) -> None:
        """See `Peers.join`. It goes tensor by tensor, so that no process ever has the whole sum of more than one."""
        firsts = layout.rows(0, self.world_size)
        for i, (entry, first, total) in enumerate(zip(layout.entries, firsts, totals, strict=True)):
            whole = torch.zeros(first.stop * self.world_size, dtype=torch.float64, device=self._sum.device)
            of_tensor = _like(whole, total)[: entry.size]
            for blocks, weights, longest in self._added:
                bound = None if longest is None else [longest[i]]
                add_sums(backend, [blocks[i]], [weights[i]], [of_tensor], [None], bound)
            own = whole.new_empty(first.stop)
            if first.stop:
                self.note(f"sum {i}")
                with super()._lost():
                    processes.reduce_scatter(own, whole, self._group)
            total += _like(own, total)[: total.shape[0]]
        self._added = []

    def drop(self) -> None:
        """See `Peers.drop`."""
        self._added = []

    def reduced(self, totals: list[Any], pieces: Sequence[Piece]) -> list[Any]:
        """See `Peers.reduced`. `join` already did it."""
        assert not self._added, "join first"
        return totals

    def whole(self, parts: Sequence[Any], pieces: Sequence[Piece], layout: Layout) -> list[Any]:
        """See `Peers.whole`: one tensor after the other."""
        tensors = []
        for part, entry, first in zip(parts, layout.entries, layout.rows(0, self.world_size), strict=True):
            tensor = processes.as_tensor(part)
            own = tensor.new_zeros(first.stop)
            own[: len(tensor)] = tensor
            every = own.new_empty(first.stop * self.world_size)
            with self._lost():
                if first.stop:
                    processes.all_gather(every, own, self._group)
            tensors.append(_like(every, part)[: entry.size])
        return tensors

    def agree(self, failed: bool, state: str = "", settings: str = "") -> None:
        """See `Peers.agree`. A process that failed sends nothing, since the others may wait for another message."""
        if failed:
            self._begun = True
            return
        digests = [self._order.digest(), *(hashlib.sha256(text.encode()).digest() for text in (state, settings))]
        own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int64).to(self._sum.device)
        gathered = own.new_empty(len(own) * self.world_size)
        with super()._lost():
            processes.all_gather(gathered, own, self._group)
        every = gathered.view(self.world_size, 3, -1)
        if any(not torch.equal(order, every[self.rank, 0]) for order in every[:, 0]):
            raise PrivacyError(
                "processes ran the layers of the sharded model in different orders: no rank releases the step; every "
                "batch must take the same path through a fully_shard model"
            )
        self._begun = False
        processes.check_rows(every[:, 1:].transpose(0, 1))

    @contextmanager
    def _lost(self) -> Iterator[None]:
        if self._begun:
            raise PrivacyError(
                f"rank {self.rank} left a step of a sharded model midway, so that its messages no longer fit those of "
                "the others; nothing of the step is released: start all processes again from the last checkpoint"
            )
        with super()._lost():
            yield


def _like(tensor: torch.Tensor, array: Any) -> Any:
    return tensor if isinstance(array, torch.Tensor) else tensor.numpy()


def check_shards(model: nn.Module, group: Any) -> None:
    """Refuse a sharded model that fully_shard did not shard along rows over the run's processes."""
    root: Any = model
    if not isinstance(model, FSDPModule) or root._get_fsdp_state()._is_root is False:
        raise ArgumentError(
            f"model={type(model).__name__}: parameters are DTensors, but the model is no root of fully_shard: call "
            "fully_shard on the model itself after its layers; tensor parallelism is not supported"
        )
    if not hasattr(model, "reset_iter_state"):
        raise ArgumentError(f"torch {torch.__version__}: fully_shard models need torch 2.13 or later")
    for module in sharded_modules(model):
        module.reshard()
    for name, parameter in model.named_parameters():
        complaint = next(_complaints(parameter, group), None)
        if complaint is not None:
            raise ArgumentError(f"parameter {name!r} {complaint}")
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ArgumentTypeError(
                f"parameter {name!r} has dtype {parameter.dtype}: sharded ones must be float32 or float64"
            )
    states, groups = groups_of(model)
    if any(len(state._fsdp_param_groups) > 1 for state in states):
        raise ArgumentError("fully_shard(shard_placement_fn=...): must give all parameters of a module one mesh")
    for each in groups:
        names = ", ".join(type(module).__name__ for module in each.modules)
        if each.mp_policy.param_dtype is not None or each.mp_policy.output_dtype is not None:
            raise ArgumentError(f"fully_shard({names}, mp_policy=...): must leave the dtypes as they are")
        if isinstance(each.offload_policy, CPUOffloadPolicy):
            raise ArgumentError(f"fully_shard({names}, offload_policy=CPUOffloadPolicy()): must be left out")
        if each.post_forward_mesh_info not in (None, each.mesh_info):
            raise ArgumentError(f"fully_shard({names}, reshard_after_forward=...): must be True, False or None")


def _complaints(parameter: Any, group: Any) -> Iterator[str]:
    """Yield reasons to refuse a parameter."""
    if not hasattr(parameter, "to_local"):
        if parameter.requires_grad:
            yield "is not sharded, and others are: call fully_shard on the whole model, without ignored_params"
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1:
        yield f"is on a mesh of {mesh.ndim} dimensions, as HSDP and tensor parallelism make: must be on one of 1"
    elif placements != (Shard(0),):
        yield f"has the placement {placements[0]}: must be sharded along dimension 0"
    elif dist.get_process_group_ranks(mesh.get_group()) != dist.get_process_group_ranks(group):
        yield "is sharded over other processes than the run's: give its mesh's group as process_group"
    elif type(parameter.to_local()) is not torch.Tensor:
        yield f"has shards of class {type(parameter.to_local()).__name__}: must be plain tensors"
    else:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        ((_, start, stop),) = Layout.of([("", parameter.shape)]).rows(rank, world_size)
        if local(parameter).numel() != stop - start:
            yield f"has {local(parameter).numel()} elements in rank {rank}: must have {stop - start}"


def check_run_of_shards(method: Method, gradients: str) -> str:
    """Return how the gradients of a sharded model are computed; refuse settings that such a run does not support."""
    if method.galore is not None:
        problem = f"galore={method.galore!r}: projects whole matrices, and a process owns rows of them"
    elif method.preconditioning is not None:
        problem = "preconditioning: scales whole gradients before the clip"
    elif method.update.second_moment == "public":
        problem = "second_moment='public': takes whole gradients of public data"
    elif gradients not in ("auto", "pairs"):
        problem = f"gradients={gradients!r}: forms whole gradients of every example"
    else:
        return "pairs"
    raise ArgumentError(f"{problem}; with a fully_shard model it must be left out")
