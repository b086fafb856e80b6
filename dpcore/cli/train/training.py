"""One training run: private steps, held-out evaluations, and the files of its folder, correct at every moment."""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F

from dpcore.cli.datasets import Dataset, TextDataset
from dpcore.cli.datasets.image_folder import Images
from dpcore.cli.datasets.text import CLASSES
from dpcore.cli.gradients import save_gradients
from dpcore.cli.interrupt import Interruption
from dpcore.cli.train import language
from dpcore.cli.train.examples import examples_of
from dpcore.cli.train.run_folder import RunFolder
from dpcore.cli.train.settings import Settings
from dpcore.errors import BackendError, BudgetError, DataError, DeltaWarning
from dpcore.ledger.allowance import largest
from dpcore.spec import backends as config
from dpcore.spec.canonical import plain
from dpcore.statement.build import guarantee
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE
from dpcore.torch import HeldOut, make_private, save_state
from dpcore.torch.checkpoint import read_state
from dpcore.torch.export import files
from dpcore.torch.gradients.per_example import Loss
from dpcore.torch.model import models
from dpcore.torch.model.weights import load_weights

# The checkpoint of a run that a ledger pays for is one file, replaced whole, and as secret as the data: it holds the
# run's keys, and whoever has them can subtract the noise. So it is readable by its owner only, and does not lie in the
# run folder, whose files are all public (`RunFolder.checkpoint`). A crash costs the steps since the last one.
PARTS = {"settings", "evaluations", "model", "optimizer", "ledger"}
SECONDS: Final = 60.0
"""At the latest after so long."""
SHARE: Final = 0.01
"""Or after this share of the plan's steps: a crash then costs half of it on average."""


class Autosave:
    """Saves when it is due, in a run of `steps` planned steps from step `begun` on; the clock is in seconds."""

    def __init__(
        self, save: Callable[[], None], steps: int, begun: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._save, self._every, self._clock = save, every(steps), clock
        self._step, self._at = begun, clock()

    def after(self, step: int) -> None:
        """Save after a step if that is due."""
        if step - self._step >= self._every or self._clock() - self._at >= SECONDS:
            self.now(step)

    def now(self, step: int) -> None:
        """Save in any case."""
        self._save()
        self._step, self._at = step, self._clock()


def every(steps: int) -> int:
    """Return after how many steps of a plan a checkpoint is due."""
    return max(1, int(SHARE * steps))


def cost(steps: int) -> str:
    """Return what a crash would cost a run of `steps` steps."""
    return (
        f"a checkpoint is saved every {every(steps):,} of {steps:,} steps or {SECONDS:.0f} seconds, whichever comes "
        f"first; a crash or kill -9 costs the steps since then and up to {largest(steps):,} reserved ahead, which stay "
        "charged; Ctrl-C, SIGTERM and the budget's end cost none"
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of `dpcore train`; DataError if it is damaged or something else."""
    content = read_state(path)
    if not isinstance(content, dict) or set(content) != PARTS:
        raise DataError(f"checkpoint {path}: is damaged, or no checkpoint; take an undamaged copy")
    return content


# Examples of one evaluation's pass, fewer if each has more numbers than this.
_EVALUATION_BATCH, _EVALUATION_NUMBERS = 1000, 1 << 13
_SECONDS_BETWEEN_REPORTS = 0.25
# Models whose work is a product of parameters and examples; convolutions have far more.
_DENSE = ("logistic", "mlp")
# Number of products in a pass over a batch, below which threads cost more than they save.
_SMALL = 1 << 24
# If one of them is set, the user chose the number of threads.
_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

HELD_OUT = (
    "Held-out accuracy and loss cost nothing only if, as declared, no example of the test set is in the training set."
)
BEGUN = (
    "The weights that the run begins from, of a file, cost nothing only if, as declared, they do not depend on the "
    "training data."
)
_RESERVED = (
    WRITTEN_BEFORE
    + " the steps of epoch {epoch}: all of them count as taken. If nothing newer stands here, the run was "
    "killed during that epoch, and spent at most what is stated."
)


def _device(backend: str) -> torch.device:
    if backend != "triton":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    raise BackendError(
        "backend='triton': needs a CUDA device, but there is none; use --backend numpy, or set TRITON_INTERPRET=1 to "
        "try Triton's interpreter (slow)"
    )


class Outcome(NamedTuple):
    """How a training run ended, and the statement for the steps that lead to its parameters.

    `budget` is the reason if a ledger's budget ended the run, and `diverged` names what was no longer finite.
    """

    statement: Statement
    budget: str
    diverged: str

    @property
    def complete(self) -> bool:
        """Whether all planned steps were taken."""
        return self.statement.steps_taken == self.statement.steps_planned


class Training:
    """A run that is built and can be started; `evaluations` are those so far, `remarks` are sentences for its user.

    The data's training part is private; its test part is declared not to be in it. A ledger pays for the steps and
    lists the run as `run_name`.
    """

    def __init__(self, settings: Settings, dataset: Dataset, ledger: Path | None = None, run_name: str = "") -> None:
        self.settings, self.ledger = settings, ledger
        dataset = dataset.at(settings.image_size)
        self.evaluations: list[dict[str, Any]] = []
        # The seed determines only the initial weights: noise and sampling have their own keys.
        torch.manual_seed(settings.seed)
        loss: Loss = F.cross_entropy
        fresh: tuple[str, ...] = ()
        numbers = max(math.prod(dataset.shape), (settings.image_size or 0) ** 2)
        self._metrics, self._batch = _METRICS, max(1, _EVALUATION_BATCH // max(1, numbers // _EVALUATION_NUMBERS))
        if isinstance(dataset, TextDataset):
            built, self._batch = language.build(settings, dataset), language.EVALUATION_BATCH
            if dataset.task != CLASSES:
                loss, self._metrics = language.token_loss, language.METRICS
        else:
            built = models.build(
                settings.model,
                dataset.shape,
                dataset.classes,
                settings.model_scale or 1,
                image_size=settings.image_size,
                pixel_mean=settings.pixel_mean or (),
                pixel_std=settings.pixel_std or (),
            )
            fresh = () if settings.weights is None else load_weights(built, settings.weights)
        self.model = built.to(_device(settings.backend))
        with config.use_backend(settings.backend), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.private = make_private(
                self.model,
                examples_of(dataset.train_inputs, dataset.train_targets, settings.augmentations is not None),
                settings.build_method(len(dataset)),
                target_epsilon=settings.epsilon,
                target_delta=settings.delta,
                epochs=settings.epochs,
                sampling=str(settings.sampling),
                max_batch_size=settings.max_batch_size,
                groups=settings.groups,
                loss=loss,
                precision=None if settings.precision == "float32" else settings.precision,
                augmentations=settings.augmentations or 1,
                num_workers=settings.num_workers or 0,
                ledger=ledger,
                run_name=None if ledger is None else run_name or f"{dataset.name}, {settings.model}, {settings.method}",
            )
        # Commands remark on delta themselves, before torch is imported.
        self.remarks = [str(one.message) for one in caught if one.category is not DeltaWarning]
        if fresh:
            self.remarks.append(f"weights: {', '.join(fresh)} begin as without a file, since its last layer is another")
        self._test = examples_of(dataset.test_inputs, dataset.test_targets)
        if settings.record_gradients is not None:
            self.private.record_gradients(settings.record_gradients)
        self.steps_per_epoch = len(self.private.loader)

    def save(self, path: Path) -> None:
        """Write a checkpoint, which `read_checkpoint` reads. **Secret**: it has the keys."""
        save_state(path, {"settings": plain(self.settings.to_dict()), "evaluations": list(self.evaluations),
            "model": self.model.state_dict(), "optimizer": self.private.optimizer.state_dict(),
            "ledger": str(Path(self.ledger or "").absolute())})  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the checkpoint of a run with the same settings."""
        self.model.load_state_dict(state["model"])
        self.private.optimizer.load_state_dict(state["optimizer"])
        self.evaluations = list(state["evaluations"])

    def statement(self, steps: int, note: str = "") -> Statement:
        """Return the statement for the first `steps` steps and everything else that may have been released by now."""
        now: Statement = self.private.statement(note=note)
        begun = () if self.settings.weights is None and self.settings.model_dir is None else (BEGUN,)
        caveats = (*now.caveats, HELD_OUT, *begun)
        if steps == now.steps_taken or self.private.stopped_by_results:  # then its event is the plan's
            return replace(now, steps_taken=steps, caveats=caveats)
        event, planned = self.private.event_after(steps), self.private.event_after(self.private.plan.steps)
        return replace(now, steps_taken=steps, caveats=caveats, **guarantee(event, planned, now.delta))

    def accuracy(self, inputs: Any, targets: Any) -> float:
        """Return the accuracy of the method's output on other held-out examples."""
        if isinstance(inputs, Images):
            inputs = replace(inputs, size=self.settings.image_size or inputs.size)
        held_out = HeldOut(self.private, examples_of(inputs, targets), self._metrics, batch_size=self._batch)
        return held_out.evaluate()["test_accuracy"]

    def run(
        self,
        interruption: Interruption,
        folder: RunFolder | None = None,
        tell: Callable[[int, dict[str, Any] | None], None] = lambda _taken, _evaluation: None,
        *,
        alone: bool = True,
    ) -> Outcome:
        """Train to the end of the plan, or until a signal or a ledger's budget stops the run.

        This writes all files of `folder` but config.json. It writes a statement *before* the steps that it covers, and
        again after them: if the process is killed in between, the statement counts too much, never too little.

        A run that is `alone`, not one of a comparison, also ends if the parameters or the held-out loss are not finite,
        and then leaves no model. Looking at both costs no privacy: the parameters are released, and the loss depends
        only on them and on data that are not in the training set. If a ledger pays for it, it saves checkpoints.

        `tell` is called with the steps taken, a few times a second, and with each evaluation. Neither it nor the folder
        gets a training loss, a batch's size, a clipped share or a step's duration: those are functions of the private
        data, or of the secret sample, without noise.
        """
        private, planned, begun = self.private, self.private.plan.steps, self.private.steps_taken
        reported, saves = -math.inf, None
        evaluated = self.evaluations[-1]["step"] if self.evaluations else -1
        held_out = HeldOut(private, self._test, self._metrics, batch_size=self._batch)
        if folder is not None:
            folder.write_metrics(self.evaluations)
            if alone and self.ledger is not None:
                saves = Autosave(partial(self.save, folder.checkpoint), planned, begun)
        budget, diverged, stopped = "", "", False
        with suited(self):
            for epoch in range(begun // self.steps_per_epoch + 1, self.settings.epochs + 1):
                if folder is not None:
                    reserved = min(epoch * self.steps_per_epoch, planned)
                    folder.write_statement(self.statement(reserved, _RESERVED.format(epoch=epoch)))
                try:
                    for batch in private.loader:
                        private.step(batch)
                        if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS or private.steps_taken == planned:
                            reported = time.monotonic()
                            tell(private.steps_taken, None)
                        if alone and not self._finite():
                            diverged = "the parameters are"
                        if (stopped := self._stopped(interruption)) or diverged:
                            break
                        if saves is not None:
                            saves.after(private.steps_taken)
                except BudgetError as end:
                    if private.steps_taken == 0:
                        raise
                    budget = str(end)
                if not diverged and evaluated < private.steps_taken:
                    evaluation, evaluated = self._evaluate(held_out), private.steps_taken
                    if alone and not math.isfinite(evaluation["test_loss"]):
                        diverged = "the held-out loss is"
                        private.stopped_by_results = True  # before the state is saved
                    if folder is not None:
                        folder.log(evaluation)
                    tell(evaluated, evaluation)
                    if saves is not None:
                        saves.now(evaluated)
                if stopped or budget or diverged or self._stopped(interruption):
                    break
        private.close()
        note = f"Stopped by {interruption.name} before the planned end." if private.steps_taken < planned else ""
        if budget:
            note = f"Stopped by the ledger's budget: {budget}."
        if diverged:
            note = f"Training diverged: {diverged} no longer finite. No model was kept."
            private.stopped_by_results = True
        statement = self.statement(private.steps_taken, note)
        if folder is not None:
            self._finish(folder, statement, keep=not diverged)
        return Outcome(statement, budget, diverged)

    def _finite(self) -> bool:
        """Whether all parameters are still finite. One sum, so that the host waits for the device only once."""
        return bool(torch.stack([p.detach().double().sum() for p in self.model.parameters()]).sum().isfinite())

    def _stopped(self, interruption: Interruption) -> bool:
        """Whether any process was interrupted: all stop after the same step."""
        if stopped := self.private.any_process(bool(interruption)):
            interruption.signal = interruption.signal or SIGTERM  # which torchrun sends to all
        return stopped

    def _evaluate(self, held_out: HeldOut) -> dict[str, Any]:
        evaluation: dict[str, Any] = held_out.evaluate()
        if held_out.history:  # in the first process
            logged = held_out.history[-1]
            evaluation = {
                "epoch": round(logged["step"] / self.steps_per_epoch, 6),
                "step": logged["step"],
                "epsilon": logged["epsilon"],
                "delta": self.settings.delta,
                **evaluation,
                "learning_rate": logged["learning_rate"],
            }
        self.evaluations.append(evaluation)
        return evaluation

    def _finish(self, folder: RunFolder, statement: Statement, *, keep: bool) -> None:
        """Write the last statement and the files that exist only at the end."""
        folder.write_statement(statement)
        if not keep:
            return
        settings = self.settings
        write_model(folder, statement, settings, self.private.output_state_dict(), self.evaluations)
        if settings.record_gradients is not None:
            save_gradients(folder.path, **self.private.recorded)


def write_model(
    folder: RunFolder,
    statement: Statement,
    settings: Settings,
    state: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    **more: str,
) -> None:
    """Write the model with its statement and card, which has `more` rows."""
    trained = {"data": settings.data, "model": settings.model,
        "parameters": sum(tensor.numel() for tensor in state.values()),
        "held-out accuracy": f"{100 * evaluations[-1]['test_accuracy']:.2f} %", **more}  # fmt: skip
    title = f"{settings.data}, {settings.model}, {settings.method}"
    for name, content in files(statement, state, title=title, trained=trained).items():
        folder.write(name, content)


def _accuracy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == targets).double().mean()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(logits, targets)
    return loss.nan_to_num(math.inf, math.inf)  # a record has no NaN


_METRICS = {"test_accuracy": _accuracy, "test_loss": _loss}


@contextmanager
def suited(training: Training) -> Iterator[None]:
    """Run a small model's steps in one thread inside the block, unless the environment sets the number."""
    former = torch.get_num_threads()
    products = sum(p.numel() for p in training.model.parameters()) * training.private.plan.batch_size
    small = training.settings.model in _DENSE and products < _SMALL
    if small and not any(name in os.environ for name in _CHOSEN):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)
