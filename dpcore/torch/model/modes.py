"""Watches the modes of a run's modules: what was frozen stays so, and dropout is not off unnoticed."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from dpcore.errors import TrainingWarning
from dpcore.torch.model.check_module import check_still_frozen


class Modes:
    """The modes of a model's modules, looked at before every step."""

    def __init__(self, model: nn.Module, frozen: tuple[nn.Module, ...]) -> None:
        self._model, self._frozen = model, frozen
        self._dropping = [(name, module) for name, module in model.named_modules() if _drops(module)]
        self._told = False

    def check(self) -> None:
        """Refuse frozen modules that train; warn once of a whole model in eval mode that has dropout.

        A model in training mode of which some modules are in eval mode was made so on purpose.
        """
        check_still_frozen(self._model, self._frozen)
        if self._told or self._model.training:
            return
        off = [name for name, module in self._dropping if not module.training]
        if off and len(off) == len(self._dropping):
            self._told = True
            warnings.warn(
                f"the model is in eval mode, so its dropout (module {off[0]!r}) is off in these steps; call "
                "model.train() before the steps, as after an evaluation. Said once; the steps are taken as the model "
                "is",
                TrainingWarning,
                stacklevel=3,
            )


def _drops(module: nn.Module) -> bool:
    """Whether a module drops values at random in training mode, by what torch's own classes say."""
    chance = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(chance, float) and chance > 0
