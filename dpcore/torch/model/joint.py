"""A loss of each example that several models make together, as the one model of a private run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree


class JointLoss(nn.Module):
    """The loss of each example, made by several models, as the model of `dpcore.torch.make_private`.

    Parameters
    ----------
    losses : callable
        ``losses(*parts)`` of a batch, which it gets whole: the items of a tuple, the fields of a mapping by name. It
        returns one loss for each example, (B,). It may call the models from where it was written. Several losses
        (auxiliary ones, or those of several backward passes) are added up, example by example. A number that changes
        from step to step, as a weight, must be an attribute of one of the models, or of this object.
    trained : iterable of torch.nn.Module
        Models whose parameters with ``requires_grad`` are trained. A parameter of several models counts once.
    held : iterable of torch.nn.Module
        Further models that `losses` calls, as a generator. A step reads their present values and gives them no
        gradient, also where they require gradients. A parameter of a trained model stays trained. Several processes
        must hold equal models.

    Raises
    ------
    ArgumentError
        If `trained` is empty. From the call of `make_private`: if `losses` does not return one loss for each example.

    Notes
    -----
    A step clips the gradient of an example's loss by the parameters of all trained models, as one vector: the example
    moves the sum by at most C, however many losses and models there are. Terms that do not depend on it, as a loss of
    data made up for it, stand inside of the clip and change nothing of that. What `losses` draws is as secret as
    dropout masks.

    A step of another optimizer on `held` or `trained` models, by released parameters, public data and noise alone, is
    post-processing: the next step begins at a function of what was released. So a loss of made-up data may as well be
    such a step, which has no clip and needs no noise. It must not know a batch, nor its size, which is secret.
    """

    def __init__(
        self, losses: Callable[..., Any], trained: Iterable[nn.Module], held: Iterable[nn.Module] = ()
    ) -> None:
        super().__init__()
        self.losses = validate.function(losses=losses)
        self.trained, self.held = _modules(trained=trained), _modules(held=held)
        if not self.trained:
            raise ArgumentError("trained=[]: must have at least one model")

    def forward(self, *parts: Any, **fields: Any) -> torch.Tensor:
        """Return the losses, (B,)."""
        losses, examples = self.losses(*parts, **fields), batches.size((parts, fields))
        if not isinstance(losses, torch.Tensor) or losses.numel() != examples:
            found = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ArgumentError(
                f"losses: returned {found} for {examples} examples: must be one loss for each example, ({examples},), "
                'as by reduction="none"; add up several losses, and keep (B, 1) and (B,) apart'
            )
        return losses.reshape(examples)


def _modules(**given: Any) -> nn.ModuleList:
    ((name, value),) = given.items()
    modules = list(value) if isinstance(value, Iterable) else None
    if modules is None or not all(isinstance(module, nn.Module) for module in modules):
        raise ArgumentTypeError(f"{name}={type(value).__name__!r}: must be a list of torch.nn.Module")
    return nn.ModuleList(modules)


def loss_for(model: nn.Module, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the loss of an output: of a `JointLoss`, whose output are the losses, their mean."""
    inner = [module for module in model.modules() if isinstance(module, JointLoss)]
    if not inner:
        return loss
    if inner != [model]:
        raise ArgumentError(
            f"model={type(model).__name__!r} with a JointLoss in it: the JointLoss must be the model itself (compile= "
            "of make_private in the place of torch.compile), since it says what is trained"
        )
    if loss not in (F.cross_entropy, torch.mean):
        raise ArgumentError("loss: must be left out with a JointLoss, which has the losses")
    return torch.mean


def split(model: nn.Module, batch: Tree) -> tuple[Tree, tuple[Tree, ...]]:
    """Split a batch into the model's inputs and the loss's targets; a `JointLoss` gets all of it."""
    if isinstance(model, JointLoss):
        return batches.tree_map(lambda tensor: tensor, batch), ()
    return batches.normalize(batch)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a run of this model trains, tied ones once."""
    owner = model.trained if isinstance(model, JointLoss) else model
    own = {id(parameter) for parameter in owner.parameters()}
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in own}
