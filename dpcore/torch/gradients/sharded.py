"""Per-example gradients of a model of fully_shard: its graph, with the gathering of each layer as operations of it.

Each process has some rows of every parameter. The graph takes these rows; before operations that read a layer's
parameters stands one that gathers them from all processes, and they are freed when another layer is gathered. A layer
whose parameters fully_shard would keep after its forward pass (``reshard_after_forward=False``, and the root's) is
gathered once.

Notes
-----
All processes must run the graph equally often, since each gathering waits for all; one without examples runs it on a
made-up one. In what order layers are gathered follows from the graph, and processes compare it before a sum is released:
two with different graphs would join the shards of different layers.

No gradient of a parameter is formed, so that none leaves a process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from dpcore.errors import PrivacyError
from dpcore.mechanism.peers import LOST
from dpcore.stages.clipping.blocks import Block
from dpcore.torch import processes
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree, trial_batch
from dpcore.torch.gradients.capture import Captured
from dpcore.torch.gradients.per_example import Loss, PerExampleGradient
from dpcore.torch.gradients.program import Gathers
from dpcore.torch.model.functional import Values, local, slots

Note = Callable[[str], None]
"""Is told of each message, so that processes can compare their order."""


class ShardedGradient(PerExampleGradient):
    """See `PerExampleGradient`. The blocks are of whole gradients, of this process's examples alone.

    `note` is told of each gathering.
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
    """See `Values`: of each parameter this process's rows. `held` is what fully_shard keeps for itself."""

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
        """Return what this process has of the parameters: some rows of each."""
        return [local(shard) for shard in self._shards]

    def settle(self) -> None:
        """Free what a call of the model itself has gathered, as an evaluation does."""
        self._reset()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Take fully_shard's hooks out: the graph is captured with whole parameters."""
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
        """Return what puts the gathering of each layer into the graph."""
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
    """Parameters that are gathered together: placeholders of the graph, with the whole ones' shapes."""

    def __init__(
        self, number: int, members: list[Node], shapes: list[torch.Size], lasting: bool, group: Any, note: Note
    ) -> None:
        self.number, self.members, self.lasting = number, members, lasting
        self.__name__ = f"gather_layer_{number}"
        self._shapes, self._group, self._note = shapes, group, note

    def __call__(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole parameters. Of each a process sends ceil(n / world size) rows, the last ones padded."""
        world = dist.get_world_size(self._group)
        kinds = list(dict.fromkeys(row.dtype for row in rows))
        found: list[torch.Tensor | None] = [None] * len(rows)
        self._note(self.__name__)
        for kind in kinds:
            places = [place for place, row in enumerate(rows) if row.dtype == kind]
            sizes = [-(-self._shapes[place][0] // world) * self._shapes[place][1:].numel() for place in places]
            own = rows[0].new_zeros(sum(sizes), dtype=kind)
            for part, place in zip(torch.split(own, sizes), places, strict=True):
                part[: rows[place].numel()] = rows[place].reshape(-1)
            every = own.new_empty(world * len(own))
            try:
                processes.all_gather(every, own, self._group)
            except RuntimeError as cause:  # what torch.distributed raises where a process is gone
                raise PrivacyError(LOST) from cause
            for part, place in zip(torch.split(every.view(world, -1), sizes, 1), places, strict=True):
                shape = self._shapes[place]
                found[place] = part.reshape(-1, *shape[1:])[: shape[0]]
        return found  # type: ignore[return-value]


def put_gathers(graph: Graph, layers: dict[int, Layer]) -> None:
    """Let operations take gathered parameters in the place of placeholders, which hold some rows of each."""
    of = {place: number for number, layer in layers.items() for place in layer.members}
    viewed: dict[Node, Node] = {}  # of views of a parameter, which are made anew where they are used
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

            # Copies of views must stand before the node: they are made first.
            copies = {i: whole_of(i) for i in taken}
        node.args = map_arg(node.args, lambda n: copies.get(n, n))  # noqa: B023
        node.kwargs = map_arg(node.kwargs, lambda n: copies.get(n, n))  # noqa: B023
    graph.eliminate_dead_code()


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that were given to fully_shard."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def groups_of(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return fully_shard's states of a model's modules, and the groups of parameters that it gathers together."""
    states = {id(state): state for state in (module._get_fsdp_state() for module in sharded_modules(model))}
    return list(states.values()), [group for state in states.values() for group in state._fsdp_param_groups]
