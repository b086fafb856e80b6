"""One training run: private steps, held-out evaluations, and a statement that is true at every moment."""

from __future__ import annotations

import math
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from dpcore import accounting
from dpcore.cli.datasets import Dataset
from dpcore.cli.interrupt import Interruption
from dpcore.cli.train.settings import Settings
from dpcore.errors import BackendError, BudgetError, DataError, DeltaWarning, TrainingWarning
from dpcore.ledger.allowance import largest
from dpcore.plan.plan import Plan
from dpcore.spec import backends as config
from dpcore.spec.canonical import plain
from dpcore.statement.guarantee import guarantee
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE
from dpcore.torch import HeldOut, make_private
from dpcore.torch.model import models

# The checkpoint of a run that a ledger pays for: one file, replaced whole, and as secret as the data.
#
# It holds the run's keys: whoever has it can subtract the noise. So it is readable by its owner only, and does not lie
# in the run folder, whose files are all public (`RunFolder.checkpoint`). A crash costs the steps since the last one.


PARTS = {"settings", "evaluations", "model", "optimizer", "ledger"}
SECONDS: Final = 60.0
"""At the latest after so long."""
SHARE: Final = 0.01
"""Or after this share of the plan's steps: a crash then costs half of it on average."""
TIME: Final = 0.1
"""Saves between evaluations take at most this share of the time; only a run of seconds is held back by it."""


class Autosave:
    """Saves when it is due, in a run of `steps` planned steps from step `begun` on; the clock is in seconds."""

    def __init__(
        self, save: Callable[[], None], steps: int, begun: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._save, self._every, self._clock = save, every(steps), clock
        self._step, self._at, self._took = begun, clock(), 0.0

    def after(self, step: int) -> None:
        """Save after a step if that is due."""
        passed = self._clock() - self._at
        if (step - self._step >= self._every or passed >= SECONDS) and self._took <= TIME * passed:
            self.now(step)

    def now(self, step: int) -> None:
        """Save in any case."""
        begun = self._clock()
        self._save()
        self._step, self._at = step, self._clock()
        self._took = self._at - begun


def every(steps: int) -> int:
    """Return after how many steps of a plan a checkpoint is due."""
    return max(1, int(SHARE * steps))


def cost(steps: int) -> str:
    """Say what a crash would cost a run of so many steps."""
    return (
        f"a checkpoint is saved every {every(steps):,} of {steps:,} steps or {SECONDS:.0f} seconds, whichever comes "
        f"first (less often where that would take over {TIME:.0%} of the time); a crash or kill -9 costs the steps "
        f"since then and up to {largest(steps):,} reserved ahead, which stay charged; Ctrl-C, SIGTERM and the budget's "
        "end cost none"
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of `dpcore train`; DataError where it is damaged or something else."""
    try:
        # torch.load does not look at the checksums: a flipped bit of a key would be read as another key.
        with zipfile.ZipFile(path) as archive:
            whole = archive.testzip() is None
        content = torch.load(path, map_location="cpu", weights_only=True) if whole else None
    except OSError as cause:
        raise DataError(f"checkpoint {path}: cannot be read ({cause.strerror})") from cause
    except Exception as cause:  # torch has many kinds
        raise DataError(f"checkpoint {path}: is damaged, or no checkpoint; take an undamaged copy") from cause
    if not isinstance(content, dict) or set(content) != PARTS:
        raise DataError(f"checkpoint {path}: is damaged, or no checkpoint; take an undamaged copy")
    return content


_EVALUATION_BATCH = 1000
_SECONDS_BETWEEN_REPORTS = 0.25
# Whose work is that of a product of parameters and examples; convolutions have far more.
_DENSE = ("logistic", "mlp")
# Products of a pass over a batch, below which handing work to threads takes longer than the work.
_SMALL = 1 << 24
# With one of them a person has chosen.
_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

HELD_OUT = (
    "Held-out accuracy and loss cost nothing only if, as declared, no example of the test set is in the training set."
)
_RESERVED = (
    WRITTEN_BEFORE
    + " the steps of epoch {epoch}: all of them count as taken. If nothing newer stands here, the run was "
    "killed during that epoch, and spent at most what is stated."
)


def arguments_of(settings: Settings, dataset: Dataset) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model of some settings, fresh, and the other arguments of its `make_private`."""
    # The seed decides the initial weights and nothing else: noise and sampling have a key of their own.
    torch.manual_seed(settings.seed)
    model = models.build(settings.model, dataset.shape, dataset.classes).to(_device(settings.backend))
    return model, {
        "data": (torch.tensor(dataset.train_inputs), torch.tensor(dataset.train_targets)),
        "method": settings.build_method(len(dataset)),
        "target_epsilon": settings.epsilon,
        "target_delta": settings.delta,
        "epochs": settings.epochs,
        "loss": torch.nn.functional.cross_entropy,
        "sampling": str(settings.sampling),
        "max_batch_size": settings.max_batch_size,
        "groups": settings.groups,
    }


def _device(backend: str) -> torch.device:
    if backend != "triton":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    raise BackendError(
        "backend='triton': needs a CUDA device, and there is none; use --backend numpy, or set TRITON_INTERPRET=1 to "
        "try Triton's interpreter (slow)"
    )


class Outcome(NamedTuple):
    """How the training of a run ended, and the statement for it.

    `steps_taken` lead to the parameters; the statement counts more where a run was killed and resumed. `budget` says
    why a ledger's budget ended the run, if it did, and `diverged` what was no longer finite. `seconds` is how long it
    took, which tells the sizes of the batches: it is not for the run's folder.
    """

    statement: Statement
    steps_taken: int
    budget: str
    diverged: str
    seconds: float


class Training:
    """A run that is built and can be started; `evaluations` are those so far, `remarks` sentences for its user alone.

    The data's training part is private; its test part is declared not to be in it. A ledger pays for the steps, and
    knows the run by `run_name`.
    """

    def __init__(self, settings: Settings, dataset: Dataset, ledger: Path | None = None, run_name: str = "") -> None:
        self.settings = settings
        self.evaluations: list[dict[str, Any]] = []
        self.model, arguments = arguments_of(settings, dataset)
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
        test = torch.tensor(dataset.test_inputs), torch.tensor(dataset.test_targets)
        metrics = {"test_accuracy": _accuracy, "test_loss": _loss}
        self._held_out = HeldOut(self.private, test, metrics, batch_size=_EVALUATION_BATCH)
        if settings.record_gradients is not None:
            self.private.record_gradients(settings.record_gradients)
        self.steps_per_epoch = len(self.private.loader)

    @property
    def plan(self) -> Plan:
        """The run's plan; a checkpoint may bring the last digits of its noise multiplier."""
        return self.private.plan

    def state_dict(self) -> dict[str, Any]:
        """Return what the run can go on from; `torch.load` reads it with `weights_only`. **Secret**: has the keys."""
        return {"settings": plain(self.settings.to_dict()), "evaluations": list(self.evaluations),
            "model": self.model.state_dict(), "optimizer": self.private.optimizer.state_dict()}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of a run with the same settings."""
        self.model.load_state_dict(state["model"])
        self.private.optimizer.load_state_dict(state["optimizer"])
        self.evaluations = list(state["evaluations"])

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
        interruption: Interruption,
        tell: Callable[[int, int], None] = lambda _taken, _planned: None,
        log: Callable[[dict[str, Any]], None] = lambda _evaluation: None,
        state: Callable[[Statement], None] | None = None,
        save: Callable[[], None] | None = None,
        *,
        halt: bool = False,
    ) -> Outcome:
        """Train to the end of the plan, or until a signal asks to stop or a ledger's budget ends.

        With `halt` also until the parameters or the held-out loss are not finite: both are free to look at, since the
        ones are released and the other is of them and of data that are not in the training set.

        `tell` is called with the steps taken and planned, a few times a second, and `log` with each evaluation. Neither
        hears of a training loss, a batch's size, a clipped share or a step's duration: those are functions of the
        private data, or of the secret sample, that no noise covers.

        `state` is given a statement *before* the steps that it covers are taken, and again when they were: whoever
        kills the process in between finds a statement that counts too much, never too little. `save` is called where a
        checkpoint is due: `dpcore.cli.train.training`, after each evaluation, and at an early end.
        """
        begun, started, told = self.private.steps_taken, time.perf_counter(), -math.inf
        taken, evaluated = begun, self.evaluations[-1]["step"] if self.evaluations else -1
        saves = None if save is None else Autosave(save, self.plan.steps, begun)
        budget, diverged, stopped = "", "", False
        for epoch in range(begun // self.steps_per_epoch + 1, self.settings.epochs + 1):
            reserved = min(epoch * self.steps_per_epoch, self.plan.steps)
            if state is not None:
                state(self.statement(reserved, _RESERVED.format(epoch=epoch)))
            try:
                for batch in self.private.loader:
                    self.private.step(batch)
                    taken += 1
                    if time.monotonic() - told > _SECONDS_BETWEEN_REPORTS or taken == self.plan.steps:
                        told = time.monotonic()
                        tell(taken, self.plan.steps)
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
            if not diverged and evaluated < taken:
                found, evaluated = self._evaluate(taken), taken
                if halt and not math.isfinite(found["test_loss"]):
                    diverged = "the held-out loss is"
                log(found)
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
        return Outcome(statement, taken, budget, diverged, time.perf_counter() - started)

    def _finite(self) -> bool:
        """Whether the parameters are numbers still: one sum, so that a device is waited for once."""
        return bool(torch.stack([p.detach().double().sum() for p in self.model.parameters()]).sum().isfinite())

    def _stopped(self, interruption: Interruption) -> bool:
        """Whether this process or another was asked to stop: all stop after the same step."""
        if stopped := self.private.any_process(bool(interruption)):
            interruption.take_over()
        return stopped

    def _evaluate(self, taken: int) -> dict[str, Any]:
        found: dict[str, Any] = self._held_out.evaluate()
        if self._held_out.history:  # in the first process
            logged = self._held_out.history[-1]
            found = {
                "epoch": round(taken / self.steps_per_epoch, 6),
                "step": taken,
                "epsilon": logged["epsilon"],
                "delta": self.settings.delta,
                **found,
                "learning_rate": logged["learning_rate"],
            }
        self.evaluations.append(found)
        return found


def _accuracy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == targets).double().mean()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(logits, targets)
    return loss.nan_to_num(math.inf, math.inf)  # a record holds no NaN


@contextmanager
def suited(training: Training) -> Iterator[None]:
    """Let a small model's steps run in one thread while the block runs, unless the environment says how many."""
    former = torch.get_num_threads()
    products = sum(p.numel() for p in training.model.parameters()) * training.plan.batch_size
    small = training.settings.model in _DENSE and products < _SMALL
    if small and not any(name in os.environ for name in _CHOSEN):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)
