"""Per-example gradients of a model, at any number of parameter points, by one of three ways.

"pairs": the model runs once on a whole micro-batch, and gives what each operation on a parameter saw
(`dpcore.torch.sources`). "vmap" and "one-by-one": the model sees batches of one, and rows of every gradient are formed.
For one example i and a point x all three give the gradient of ``loss(model(inputs_i[None]), *targets_i[None])``. Points
are values handed over at the call; the model's own parameters are never changed and nothing is stored on them (adding a
displacement in place and subtracting it again drifts). Model and loss get copies of the buffers and of the batch: what
they write there is gone after the call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError
from dpcore.spec.validate import choice
from dpcore.stages.clipping.blocks import Block
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients.errors import Mixes, NotProved
from dpcore.torch.gradients.proved import ProvedGradient
from dpcore.torch.model.functional import FAILURES, Values, first_line
from dpcore.torch.model.memory import is_out_of_memory
from dpcore.torch.model.repeated import RepeatedPasses
from dpcore.torch.model.state_probe import GLOBAL_HOOKS, Snapshot, keeps
from dpcore.torch.randomness import TRIAL, seeded
from dpcore.torch.sources.explicit import ExplicitGradient
from dpcore.torch.sources.places import UnknownLayout
from dpcore.torch.sources.traced import TracedGradient

T = TypeVar("T")

Loss = Callable[..., torch.Tensor]

WAYS = ("pairs", "vmap", "one-by-one")
"""From the fastest to the one that every model bears."""


class Unfit(ArgumentError):
    """A model or loss that one of `WAYS` cannot take, and another one may."""


class PerExampleGradient:
    """Gradients of one model's loss, example by example, for its parameters that require gradients.

    ``loss(output, *targets)`` is called with batches of one example, so a mean and a sum over the batch are the same.
    `way` is one of `WAYS`; `dpcore.torch.model.trial` chooses it.

    `names` are the parameters' in `named_parameters` order, tied ones once; `draws` says whether model or loss drew
    random numbers in a call on synthetic examples; `roots` are looked at for state that model and loss keep, and
    `passed_over` are large objects that are not, such as the data. `example` may be the caller's public examples.
    """

    free = True  # to run the model once more when it likes: with a sharded one all processes must

    def __init__(self, model: torch.nn.Module, loss: Loss, way: str = "pairs") -> None:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
        if isinstance(loss, type):
            raise ArgumentTypeError(f"loss={loss.__name__}: is a class; give an object of it, loss={loss.__name__}()")
        if not callable(loss):
            raise ArgumentTypeError(f"loss={loss!r}: must be a function of (output, *targets)")
        self.model = model
        self.loss = loss
        self.way = choice(WAYS, gradients=way)
        self.draws = False
        self.roots = {"model": model, "loss": loss, **GLOBAL_HOOKS}
        self.passed_over: list[Any] = []
        self.example: Tree = None
        self.reasons: dict[str, str] = {}  # why faster ways were not taken
        self.repeated: RepeatedPasses | None = None
        self._calls = 0
        self._synthetic = False
        self.names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        if not self.names:
            raise ArgumentError(
                "model without a parameter that requires gradients: set requires_grad_(True) on the ones to train"
            )
        self.values = self._values()
        self.proved: ProvedGradient | None = None
        self.traced = TracedGradient(model, self._loss_of, self.values)
        self.explicit = {
            way: ExplicitGradient(model, self._loss_of, self.values, way == "vmap") for way in WAYS if way != "pairs"
        }

    def _values(self) -> Values:
        return Values(self.model, self.names)

    def parameters(self) -> list[torch.Tensor]:
        """See `Values.parameters`."""
        return self.values.parameters()

    def __call__(
        self,
        point: Sequence[torch.Tensor],
        batch: Tree,
        seed: bytes = TRIAL,
        synthetic: bool = False,
        regular: Hashable = None,
    ) -> list[Block]:
        """Return the gradients of every example of a micro-batch at one point: a block for each of `names`.

        `point` has a value for each of `names`; it need not be the model's present parameters. The same `seed` gives
        the same dropout masks for the same batch at another point, as two-point queries need. A `synthetic` batch is
        made up, so that an error may quote torch's words; of private data they may show values. Where passes are
        `repeated`, the blocks of a `regular` micro-batch lie where those of the next one of the same name will be.
        """
        self._calls += not synthetic
        # Where a proved graph runs, no Python code does that could keep anything.
        if synthetic or self._calls & (self._calls - 1) or (self.proved is not None and self.way == "pairs"):
            return self._gradients(point, batch, seed, synthetic, regular)
        # Calls 1, 2, 4, 8, ... are looked at: what synthetic examples did not provoke shows on the first real ones.
        before = self.held()
        result = self._gradients(point, batch, seed, synthetic)
        after = self.held()
        if (path := before.changed(after)) is not None:
            before.restore()
            if self.free:  # what follows from parameters and shapes alone is left by made-up examples as well
                self._gradients(point, self._made_up(batch), seed, synthetic=True)
                path = after.changed(self.held())
            if path is not None:
                before.restore()
                raise ArgumentError(keeps(path))
        return result

    def _made_up(self, batch: Tree) -> Tree:
        """Return a batch of as many examples with none of its values."""
        if isinstance(self.example, batches.Public):
            return batches.synthetic(self.example, batches.size(batch))
        return batches.tree_map(torch.zeros_like, batch)

    def learn(self, made: Callable[[int], Tree], keep: bool = False) -> None:
        """Let the way "pairs" find the examples in the model, on batches of so many made-up ones."""
        for self.traced.one_by_one in (False, True):
            try:
                self.guarded(lambda: self.traced.learn(made, self.parameters(), keep), TRIAL, synthetic=True)
                return
            except Unfit as refusal:  # perhaps of the loss, which vmap cannot take
                if self.traced.one_by_one or isinstance(refusal.__cause__, UnknownLayout):
                    raise

    def operations(self, place: int) -> tuple[str, ...]:
        """Return the operations that the parameter of this place meets the examples in, as far as they were seen."""
        if self.way != "pairs":
            return ()
        if self.proved is not None:
            return self.proved.operations(place)
        met = [key for key, site in self.traced.sites.learned() if any(site.gave)]
        functions = (key[0] for key in met if any(place in roots for roots in key[1]))
        return tuple(dict.fromkeys(getattr(function, "__name__", str(function)) for function in functions))

    def held(self) -> Snapshot:
        """Return what model and loss hold at this moment, beside parameters."""
        return Snapshot(self.roots, [*self.model.parameters(), *self.passed_over])

    def _gradients(
        self, point: Sequence[Any], batch: Tree, seed: bytes, synthetic: bool, regular: Hashable = None
    ) -> list[Block]:
        try:
            return self._by(self.way, point, batch, seed, synthetic, regular)
        except Unfit:
            if synthetic or self.way != "pairs" or not self.free:
                raise
            # This batch led the model where no made-up one did: to an expert of a mixture, say.
            return self._by("one-by-one", point, batch, seed, synthetic)

    def _by(
        self, way: str, point: Sequence[Any], batch: Tree, seed: bytes, synthetic: bool, regular: Hashable = None
    ) -> list[Block]:
        values = [value.detach() for value in point]
        if way == "pairs" and self.proved is not None:
            return self._by_proof(self.proved, values, batch, seed, synthetic)
        function = self.traced if way == "pairs" else self.explicit[way]

        def guarded(work: Callable[[], T]) -> T:
            return self.guarded(work, seed, synthetic)

        if self.repeated is not None and regular is not None and way != "one-by-one":
            return self.repeated(function, (way, regular), values, batch, guarded)
        # Whatever model or loss write to the batch, another point and the caller see it as it was.
        given = batches.tree_map(torch.clone, batch)
        return guarded(lambda: function(values, given))

    def _by_proof(
        self, proved: ProvedGradient, values: list[torch.Tensor], batch: Tree, seed: bytes, synthetic: bool
    ) -> list[Block]:
        try:
            # A graph writes to nothing that it is given.
            return self.guarded(lambda: proved(values, batch, not synthetic), seed, synthetic)
        except NotProved as reason:  # of a batch of another form, or of a model that changed
            raise ArgumentError(self.unproved(reason)) from None

    def prove(self, example: Tree, modes: Callable[[], Iterator[None]]) -> bool:
        """Let the way "pairs" run the model's graph, if that is proved to keep the examples apart; say whether.

        `modes` puts the model into each mode that counts, the one that the run begins in last.
        """
        proved = ProvedGradient(self.model, self.loss, self._loss_of, self.names, self.held)
        self._synthetic = True
        try:
            for _ in modes():
                proved.prove(example)
        except NotProved as reason:
            self.reasons["pairs"] = self.unproved(reason)
            return False
        self.proved, self.way, self.draws = proved, "pairs", self.draws or proved.draws
        return True

    def unproved(self, reason: NotProved) -> str:
        """Return the sentence that says why there is no proof."""
        where = f"model={type(self.model).__name__}: {reason}"
        if not isinstance(reason, Mixes):
            return where
        return (
            f"{where}, so that examples of a batch are mixed: use operations that treat each example alone (GroupNorm "
            "or LayerNorm for normalization, batch_first=True for sequences)"
        )

    def guarded(self, function: Callable[[], T], seed: bytes, synthetic: bool) -> T:
        """Call a function with the generators set from `seed`; what it raises becomes a sentence of ours."""
        self._synthetic = synthetic
        device = next(self.model.parameters()).device
        others = synthetic or self.way == "one-by-one"
        try:
            with seeded(device, seed, others=others) as drew:
                result = function()
                if synthetic:
                    self._note(drew())
        except DpcoreError:
            raise
        except UnknownLayout as cause:
            raise Unfit(f"model={type(self.model).__name__}: {cause}") from cause
        except FAILURES as cause:
            if is_out_of_memory(cause):
                raise
            if synthetic:
                raise Unfit(self._failure(cause, synthetic)) from cause
            raise ArgumentError(self._failure(cause, synthetic)) from None  # its words may show values of the data
        return result

    def _loss_of(self, output: Any, targets: tuple[Tree, ...]) -> torch.Tensor:
        try:
            value: Any = self.loss(output, *targets)
        except FAILURES as cause:
            if not self._synthetic or isinstance(cause, DpcoreError) or is_out_of_memory(cause):
                raise
            name = getattr(self.loss, "__name__", type(self.loss).__name__)
            raise Unfit(
                f"loss={name}{' (the default)' if self.loss is F.cross_entropy else ''}: failed on the model's output "
                f"and {len(targets)} targets ({first_line(cause)}); give loss= a function of (output, *targets) that "
                "fits the data"
            ) from cause
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ArgumentError(
                f"loss returned {shape} for a batch of one example: it must return one number (reduction='mean' or "
                "'sum'); give the loss as loss= to make_private if it is another than the default cross_entropy"
            )
        return value.reshape(())

    def _note(self, drawn: list[Any]) -> None:
        self.draws = self.draws or bool(drawn)
        if self.way != "one-by-one" and not all(isinstance(g, torch.Generator) for g in drawn):  # noqa: TID251
            raise Unfit(
                "model or loss draws random numbers by NumPy or Python, one for a whole micro-batch, whose members "
                "depend on who else was drawn: draw by torch, or set gradients='one-by-one'"
            )

    def _failure(self, cause: Exception, synthetic: bool) -> str:
        where = f"model={type(self.model).__name__}"
        if not synthetic:
            return (
                f"{where}: failed on a drawn batch, though not on synthetic inputs; check labels and inputs for values "
                "out of range (torch's own words are not shown, since they may hold private values)"
            )
        how = {"pairs": "on a batch", "vmap": "example by example with torch.func", "one-by-one": "on a batch of one"}
        more = self.free and self.way != WAYS[-1]
        remedy = "; set gradients='auto' or 'one-by-one' to take the examples one by one" if more else ""
        return (
            f"{where}: cannot be differentiated {how[self.way]} ({first_line(cause)}); rewrite the operation without "
            f".item(), data-dependent Python control flow or in-place changes{remedy}"
        )
