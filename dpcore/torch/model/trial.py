"""Tries a model and its loss out on synthetic examples, the way they will be called, and leaves both as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from dpcore.errors import ArgumentError, DpcoreError
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.compare import learn_and_check
from dpcore.torch.model.made_up import trial_batch
from dpcore.torch.model.per_example import WAYS, PerExampleGradient, Unfit
from dpcore.torch.model.probe import probe
from dpcore.torch.model.state_probe import Snapshot, keeps
from dpcore.torch.reachable import walk


def try_out(gradient: PerExampleGradient, example: Tree, frozen: tuple[nn.Module, ...] = (), way: str = "auto") -> None:
    """Choose the fastest way to take gradients that this model bears, or refuse the model; see `Trial`."""
    _check_hooks(gradient.model)
    with Trial(gradient, example, frozen) as trial:
        if way in ("auto", "pairs") and trial.proved():
            return
        try:
            for check in (trial.registered, trial.mixing, trial.state):
                check()
            trial.ways(way)
        except Unfit as refusal:  # of several ways; here none is left
            raise ArgumentError(str(refusal)) from refusal.__cause__


class Trial:
    """The trials of a model, each of which refuses one kind of fault; leaving the block puts all back as it was.

    The model must not mix examples, model and loss must keep nothing, and under "pairs" each example's gradient must be
    what autograd gives for it alone. The model runs in training mode and in the mode it is in, but for `frozen`
    modules. Of the batch `example` only shapes, dtypes and devices are read, unless it is `batches.Public`.
    """

    def __init__(self, gradient: PerExampleGradient, example: Tree, frozen: tuple[nn.Module, ...] = ()) -> None:
        self.gradient, self.example, self._frozen = gradient, example, frozen
        self._modes = sorted({gradient.model.training, True})
        self.by_proof = False

    def __enter__(self) -> Self:
        self._start = Snapshot(self.gradient.roots, self.gradient.passed_over)
        return self

    def __exit__(self, *_: object) -> None:
        self._start.restore()

    def proved(self) -> bool:
        """Whether the model's graph is proved to keep the examples apart, and says something of made-up ones.

        Models of fully_shard, and passes in CUDA graphs, are not taken by their graphs yet. What is wrong with a model
        the other trials say, in more words.
        """
        gradient = self.gradient
        self.by_proof = gradient.free and gradient.repeated is None
        if not self.by_proof:
            return False

        def modes() -> Iterator[None]:
            for training in self._modes if not gradient.model.training else [True]:
                self._in_mode(training, lambda: None, last=training == gradient_trains)
                yield

        gradient_trains = gradient.model.training
        try:
            self.registered()
            with _Calls():
                found = gradient.prove(self.example, modes)
            self._start.restore()
            if found:
                blocks = gradient(gradient.parameters(), trial_batch(self.example, 2), synthetic=True)
                proved = gradient.proved
                assert proved is not None
                if proved.changes_state or not any(block.rows().any() for block in blocks):
                    self.state()  # which says what is wrong, if anything is: caches are filled once
                    gradient.way, gradient.proved = WAYS[0], proved
        except DpcoreError as refused:
            gradient.reasons.setdefault(WAYS[0], str(refused))
            found = False
        self._start.restore()
        if not found:
            gradient.proved = None
        return found

    def registered(self) -> None:
        """Refuse trained tensors that the model holds, say in a list of layers, and does not know as parameters."""
        _check_registered(self.gradient.model, self.gradient.passed_over)

    def mixing(self) -> None:
        """Refuse a model that mixes examples, or that changes its buffers or parameters in forward."""
        for training in self._modes:
            self._in_mode(training, partial(probe, self.gradient.values, batches.normalize(self.example)[0]))

    def state(self) -> None:
        """Refuse what model and loss keep from one call to the next."""
        gradient = self.gradient
        gradient.way = WAYS[-1]  # every model that can be trained at all bears it, and says best what is wrong
        for training in self._modes if gradient.free else ():  # a sharded one's whole gradients take too much memory
            self._in_mode(training, partial(_try_gradient, gradient, self.example))

    def ways(self, way: str = "auto") -> None:
        """Take the fastest way whose gradients are those of autograd, or refuse the one that was asked for."""
        gradient, example = self.gradient, self.example
        if way == "pairs" and self.by_proof:
            raise Unfit(gradient.reasons[way])
        for candidate in (WAYS[1:] if self.by_proof else WAYS) if way == "auto" else (way,):
            gradient.way = candidate
            try:
                if candidate == "pairs":
                    # In eval mode too, where nothing is random; last in the mode that the run begins in.
                    for training in sorted({False, *self._modes}):
                        self._in_mode(training, partial(learn_and_check, gradient, example, keep=training))
                if candidate != WAYS[-1]:
                    for training in self._modes:
                        self._in_mode(training, partial(_try_gradient, gradient, example))
                break
            except Unfit as refusal:
                if way != "auto":
                    raise
                gradient.reasons[candidate] = str(refusal)

    def _in_mode(self, training: bool, check: Callable[[], None], last: bool = False) -> None:
        self._start.restore()
        if last:  # as it is: parts of it may be in another mode
            return
        for module in self.gradient.model.modules():
            if module not in self._frozen:
                module.training = training  # not train(): a model may override it to keep parts frozen
        check()


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks on parameters' gradients, which a private run does not form."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ArgumentError(
                f"parameter {name!r} has a hook on its gradient, which a private run does not form: remove the hook, "
                "and change gradients inside of the model"
            )


def _check_registered(model: nn.Module, passed_over: Sequence[Any]) -> None:
    """Refuse trained tensors that the model holds, say in a list of layers, and does not know as its parameters."""
    for path, value, first in walk({"model": model}, [*model.parameters(), *passed_over]):
        if isinstance(value, torch.Tensor) and not first and value.requires_grad and value.is_leaf:
            raise ArgumentError(
                f"{path} requires gradients and is not registered as a parameter of the model, so that it would not be "
                "trained: hold modules in torch.nn.ModuleList or ModuleDict and tensors as torch.nn.Parameter, or call "
                "requires_grad_(False)"
            )


def _try_gradient(gradient: PerExampleGradient, example: Tree) -> None:
    """Differentiate unlike examples, from the same start and one after the other: all must leave the same.

    What is filled once, from shapes alone, does. It must not tell the first example from later ones, either.
    """
    point = [parameter.clone() for parameter in gradient.parameters()]
    one = trial_batch(example, 1)
    start = gradient.held()
    with _Calls():
        first = gradient(point, one, synthetic=True)
    left = gradient.held()
    start.restore()
    try:
        others = gradient(point, trial_batch(example, 3, other=True, label=1), synthetic=True)
    except ArgumentError:  # 1 may be no label of this loss; all else comes up again
        others = gradient(point, trial_batch(example, 3, other=True), synthetic=True)
    if gradient.free and not any(block.rows().any() for block in (*first, *others)):
        raise ArgumentError(
            "loss whose gradient is 0 in all parameters, for four made-up examples, so that a run would spend its "
            "epsilon on noise alone: forward must neither detach nor run under no_grad, the loss must have a gradient, "
            "and say something of one example alone, as a contrast within a batch does not; if made-up values are the "
            "reason, give example_batch="
        )
    by_others = gradient.held()
    later = gradient(point, one, synthetic=True)
    path = left.changed(by_others) or by_others.changed(gradient.held())
    if path is not None:
        raise ArgumentError(keeps(path))
    for name, now, once in zip(gradient.names, later, first, strict=True):
        then, before = now.rows(), once.rows()
        if not torch.allclose(then, before, rtol=1e-3, atol=1e-3 * before.abs().max().item(), equal_nan=True):
            told = "depends on whether others came before it; model and loss must not tell the first from later ones"
            raise ArgumentError(f"gradient of {name!r} of one example: {told}")


class _Calls(TorchFunctionMode):
    """Refuses losses that are another function for a batch of one, and what torch.func cannot survive."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A tensor of torch.func's in the place of the data would crash Python.
        if function == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise ArgumentError("model or loss assigns a tensor's .data: keep nothing between calls")
        if function in (F.cross_entropy, F.nll_loss):
            known = {**dict(zip(("input", "target", "weight"), args, strict=False)), **kwargs}
            target, mean = known["target"], known.get("reduction", "mean") == "mean"
            if known.get("weight") is not None and mean and target.numel() == 1:
                raise ArgumentError(
                    "loss with weight=: the mean over one example divides by the weight of its own class, so that "
                    "weights would change nothing; give the loss reduction='sum', which for one example is its "
                    "weighted loss"
                )
            if known["input"].dim() > 1 and known["input"].shape[1] == 1:
                raise ArgumentError(
                    "loss=cross_entropy for a model with one output, of which it is constant: give loss= the function "
                    "to train by, for example torch.nn.functional.mse_loss or binary_cross_entropy_with_logits"
                )
            _check_labels(known["input"], target)
        return function(*args, **kwargs)


def _check_labels(output: torch.Tensor, target: torch.Tensor) -> None:
    """Refuse labels of a dtype or shape that a loss over classes does not take; of floats it takes probabilities."""
    if target.is_floating_point():
        if target.shape != output.shape:
            raise ArgumentError(
                f"loss=cross_entropy with labels of dtype {target.dtype}: must be numbers of classes, labels.long(); "
                "for targets that are measured values give loss=, for example torch.nn.functional.mse_loss"
            )
    elif target.dtype not in (torch.int64, torch.uint8):
        raise ArgumentError(f"loss=cross_entropy with labels of dtype {target.dtype}: must be of int64, labels.long()")
    elif target.dim() == output.dim() > 1 and target.shape[1] == 1:
        raise ArgumentError(
            "loss=cross_entropy with labels of shape (n, 1): must be (n,), a class for each example, labels.squeeze(1)"
        )
