"""One training run: private steps, held-out evaluations, and a statement that is true at every moment."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpcore import accounting
from dpcore.cli.datasets import Dataset
from dpcore.cli.interrupt import Interruption
from dpcore.cli.train.arguments import arguments_of
from dpcore.cli.train.autosave import Autosave
from dpcore.cli.train.callbacks import Callback, EpochReleased, StepReleased
from dpcore.cli.train.settings import Settings
from dpcore.errors import BudgetError, DeltaWarning, TrainingWarning
from dpcore.plan.plan import Plan
from dpcore.spec import backends as config
from dpcore.spec.canonical import plain
from dpcore.statement.guarantee import guarantee
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE
from dpcore.torch import make_private

_EVALUATION_BATCH = 1000

HELD_OUT = (
    "Held-out accuracy and loss cost nothing only if, as declared, no example of the test set is in the training set."
)
_RESERVED = (
    WRITTEN_BEFORE
    + " the steps of epoch {epoch}: all of them count as taken. If nothing newer stands here, the run was "
    "killed during that epoch, and spent at most what is stated."
)


@dataclass(frozen=True)
class Outcome:
    """What a run left: the parameters by name, evaluations, and the statement for the steps it took.

    `parameters` are the method's output, which with an average over time is not where training ended. `recorded` are
    the keywords of `dpcore.cli.gradients.save_gradients`, where a record was asked for. `budget` says why a
    ledger's budget ended the run, if it did, and `diverged` what was no longer finite. `steps_taken` lead to the
    parameters; the statement counts more where a run was killed and resumed.
    """

    parameters: dict[str, Any]
    evaluations: tuple[EpochReleased, ...]
    statement: Statement
    steps_taken: int
    recorded: dict[str, Any] | None = None
    budget: str = ""
    diverged: str = ""


class Training:
    """A run that is built and can be started; `evaluations` are those so far, `remarks` sentences for its user alone.

    The data's training part is private; its test part is declared not to be in it. A ledger pays for the steps, and
    knows the run by `run_name`.
    """

    def __init__(self, settings: Settings, dataset: Dataset, ledger: Path | None = None, run_name: str = "") -> None:
        self.settings, self.dataset = settings, dataset
        self.evaluations: list[EpochReleased] = []
        self.model, arguments = arguments_of(settings, dataset)
        device = next(self.model.parameters()).device
        self._test_inputs = torch.tensor(dataset.test_inputs, device=device)
        self._test_targets = torch.tensor(dataset.test_targets, device=device)
        with config.use_backend(settings.backend), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.private = make_private(
                self.model,
                **arguments,
                ledger=ledger,
                run_name=None if ledger is None else run_name or f"{dataset.name}, {settings.model}, {settings.method}",
            )
        # The commands say all of it in remarks of their own.
        self.remarks = [str(one.message) for one in told if one.category is TrainingWarning]
        for one in told:
            if one.category not in (DeltaWarning, TrainingWarning):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if settings.record_gradients is not None:
            self.private.record_gradients(settings.record_gradients)
        self.steps_per_epoch = len(self.private.loader)

    @property
    def plan(self) -> Plan:
        """The run's plan; a checkpoint may bring the last digits of its noise multiplier."""
        return self.private.plan

    def state_dict(self) -> dict[str, Any]:
        """Return what the run can go on from; `torch.load` reads it with `weights_only`. **Secret**: has the keys."""
        return {"settings": plain(self.settings.to_dict()),
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations], "model": self.model.state_dict(),
            "optimizer": self.private.optimizer.state_dict()}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of a run with the same settings."""
        self.model.load_state_dict(state["model"])
        self.private.optimizer.load_state_dict(state["optimizer"])
        self.evaluations = [EpochReleased(**evaluation) for evaluation in state["evaluations"]]

    def epsilon_after(self, steps: int) -> float:
        """Return the smallest of the accountants' epsilons after so many steps."""
        event = self.private.event_after(steps)
        return accounting.smallest_epsilon(event, self.settings.delta)[0]

    def statement(self, steps: int, note: str = "") -> Statement:
        """Return the statement for the first `steps` steps, and for what else may have been released by now."""
        now: Statement = self.private.statement()
        event, planned = self.private.event_after(steps), self.private.event_after(self.plan.steps)
        return replace(
            now, steps_taken=steps, caveats=(*now.caveats, HELD_OUT), note=note, **guarantee(event, planned, now.delta)
        )

    def run(
        self,
        callbacks: Sequence[Callback],
        interruption: Interruption,
        state: Callable[[Statement], None] | None = None,
        save: Callable[[], None] | None = None,
        *,
        halt: bool = False,
    ) -> Outcome:
        """Train to the end of the plan, or until a signal asks to stop or a ledger's budget ends.

        With `halt` also until the parameters or the held-out loss are not finite: both are free to look at, since the
        ones are released and the other is of them and of data that are not in the training set.

        `state` is given a statement *before* the steps that it covers are taken, and again when they were: whoever
        kills the process in between finds a statement that counts too much, never too little. `save` is called where a
        checkpoint is due: `dpcore.cli.train.autosave`, after each evaluation, and at an early end.
        """
        begun = taken = self.private.steps_taken
        saves = None if save is None else Autosave(save, self.plan.steps)
        if saves is not None:
            saves.begin(begun)
        budget, diverged, stopped = "", "", False
        for epoch in range(begun // self.steps_per_epoch + 1, self.settings.epochs + 1):
            reserved = min(epoch * self.steps_per_epoch, self.plan.steps)
            if state is not None:
                state(self.statement(reserved, _RESERVED.format(epoch=epoch)))
            try:
                for batch in self.private.loader:
                    self.private.step(batch)
                    taken += 1
                    for callback in callbacks:
                        callback.on_step(StepReleased(taken, self.plan.steps))
                    if halt and not self._finite():
                        diverged = "the parameters are"
                    if (stopped := self._stopped(interruption)) or diverged:
                        break
                    if saves is not None:
                        saves.after(taken)
            except BudgetError as end:
                if taken == 0:
                    raise
                budget = str(end)
            if not diverged and (not self.evaluations or self.evaluations[-1].step < taken):
                self.evaluations.append(self._evaluate(taken))
                if halt and not math.isfinite(self.evaluations[-1].test_loss):
                    diverged = "the held-out loss is"
                for callback in callbacks:
                    callback.on_epoch(self.evaluations[-1])
                if saves is not None:
                    saves.now(taken)
            if stopped or budget or diverged or self._stopped(interruption):
                break
        self.private.close()
        note = f"Stopped by {interruption.name} before the planned end." if taken < self.plan.steps else ""
        if budget:
            note = f"Stopped by the ledger's budget: {budget}."
        if diverged:
            note = f"Training diverged: {diverged} no longer finite. No model was kept."
        statement = self.statement(taken, note)
        if state is not None:
            state(statement)
        for callback in callbacks:
            callback.on_end(statement)
        recorded = None if self.settings.record_gradients is None else self.private.recorded
        return Outcome(self._parameters(), tuple(self.evaluations), statement, taken, recorded, budget, diverged)

    def _finite(self) -> bool:
        """Whether the parameters are numbers still: one sum, so that a device is waited for once."""
        return bool(torch.stack([p.detach().double().sum() for p in self.model.parameters()]).sum().isfinite())

    def _stopped(self, interruption: Interruption) -> bool:
        """Whether this process or another was asked to stop: all stop after the same step."""
        if stopped := self.private.any_process(bool(interruption)):
            interruption.take_over()
        return stopped

    def _parameters(self) -> dict[str, Any]:
        """Return the method's output and what was not trained, as arrays; nothing of the optimizer, keys or sampler."""
        with self.private.averaged():
            return {name: p.detach().cpu().numpy().copy() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def _evaluate(self, taken: int) -> EpochReleased:
        self.model.eval()
        correct, loss, examples = 0, 0.0, len(self._test_targets)
        with self.private.averaged():
            for start in range(0, examples, _EVALUATION_BATCH):
                targets = self._test_targets[start : start + _EVALUATION_BATCH]
                inputs = self._test_inputs[start : start + _EVALUATION_BATCH]
                logits = self.model(inputs)
                correct += int((logits.argmax(dim=1) == targets).sum())
                loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        self.model.train()
        return EpochReleased(
            epoch=round(taken / self.steps_per_epoch, 6),
            step=taken,
            epsilon=float(self.epsilon_after(taken)),
            delta=self.settings.delta,
            test_accuracy=correct / examples,
            test_loss=math.inf if math.isnan(loss) else loss / examples,  # a record holds no NaN
            learning_rate=float(self.private.optimizer.param_groups[0]["lr"]),
        )
