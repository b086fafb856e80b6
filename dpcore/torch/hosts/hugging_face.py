"""`PrivateTrainer`: the Trainer of transformers, with a private step in the place of its own."""

import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput
from transformers.utils import is_datasets_available

from dpcore.errors import ArgumentError, BudgetError, PrivacyError, TrainingWarning
from dpcore.stages.method import Method
from dpcore.statement.card import METADATA
from dpcore.statement.statement import Statement
from dpcore.torch.checkpoint import read_state, save_state
from dpcore.torch.data.overlap import overlapping
from dpcore.torch.export import stated, write
from dpcore.torch.hosts.arguments import check_arguments
from dpcore.torch.make_private import make_private
from dpcore.torch.model.check_module import frozen_norms
from dpcore.torch.preferences import Pairs
from dpcore.torch.run import PrivateRun
from dpcore.torch.wrong_arguments import check_method


def data_of(trainer: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """Return a trainer's training data and its collate function, without the columns that the model does not take.

    If the loss is not the model's own, labels are the batch's target, and no input of the model.
    """
    data, collate = trainer.train_dataset, trainer.data_collator
    if is_datasets_available() and isinstance(data, importlib.import_module("datasets").Dataset):
        data = trainer._remove_unused_columns(data, description="training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    return data, collate if trainer.compute_loss_func is None else partial(labels_apart, collate)


def loss_of(trainer: Any) -> Callable[..., Any]:
    """Return the loss of one example: `compute_loss_func`, or the loss that the model returns."""
    if trainer.compute_loss_func is None:
        return returned_loss
    return partial(trainer.compute_loss_func, num_items_in_batch=None)  # it must not depend on the batch


def returned_loss(output: Any) -> Any:
    """Return the loss that a model of transformers computes if its inputs have labels."""
    return output["loss"] if isinstance(output, dict) else output[0]


def labels_apart(collate: Callable[[list[Any]], Any], examples: list[Any]) -> Any:
    """Join examples to ``(inputs, labels)``, as Trainer takes the labels out for a loss that is not the model's."""
    inputs = dict(collate(examples))
    return inputs, inputs.pop("labels", None)


FILE = "dpcore.pt"
"""A checkpoint's file with the run's state. Only its owner can read it, since with it the noise can be subtracted."""

FORWARDED = frozenset(inspect.signature(make_private).parameters) - {"model", "method"}
TAKEN = {
    "data": "train_dataset",
    "epochs": "TrainingArguments(num_train_epochs=...)",
    "steps": "TrainingArguments(max_steps=...)",
    "collate_fn": "data_collator",
}
REPLACED = ("compute_loss", "create_optimizer", "create_optimizer_and_scheduler", "get_batch_samples",
            "get_train_dataloader", "optimizer_step", "training_step")  # fmt: skip


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """The Trainer of transformers, whose every step is ``private.step(batch)``.

    Evaluation, prediction, callbacks, schedulers, saving and resuming are Trainer's own. Loss and gradient norm of
    training data are private: they are not computed, so nothing logs or saves them, and the same holds for the numbers
    of examples and tokens, floating point operations and times of steps.

    Parameters
    ----------
    *arguments
        As of `transformers.Trainer`: model, args, data_collator, train_dataset, ...
    method : Method
        As `dpcore.methods.dp_adam(...)` returns, with learning rate, clip norm and `batch_size` (of all processes).
    **options
        Those of `transformers.Trainer`, and those of `dpcore.torch.make_private`: target_epsilon, target_delta,
        sampling, ledger, params, max_memory, key, loss, ...

    Raises
    ------
    ArgumentError
        For training arguments that contradict the method or a private run; see `dpcore.torch.hosts.arguments`.

    Notes
    -----
    The loss is the one that the model returns, or `compute_loss_func`, of one example at a time: the mean over its own
    tokens, while Trainer's is over all tokens of the batch.

    The loop is short and our own: Trainer's reads a loss, a gradient norm and counts of tokens in the middle of it.
    Everything around it (`train`, `evaluation_loop`, `_save_checkpoint`, the callbacks and their order) is Trainer's.
    """

    # Attributes of Trainer.
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    control: Any

    def __init__(self, *arguments: Any, method: Method, **options: Any) -> None:
        check_method(method)
        for name in sorted(TAKEN.keys() & options.keys()):
            raise ArgumentError(f"{name}: must be given as {TAKEN[name]}")
        chosen = {name: options.pop(name) for name in sorted(FORWARDED & options.keys())}
        self._method, self._chosen = method, chosen
        self._private: PrivateRun | None = None
        self._logged = -1
        super().__init__(*arguments, **options)
        check_arguments(self.args, TrainingArguments, method, processes=self.args.world_size)
        self._check_pieces()

    def _check_pieces(self) -> None:
        """Refuse pieces of a Trainer that the private step takes the place of."""
        if self.optimizer is not None or getattr(self, "optimizer_cls_and_kwargs", None) is not None:
            raise ArgumentError("optimizers, optimizer_cls_and_kwargs: must be left out; the update is the method's")
        if self.lr_scheduler is not None:
            raise ArgumentError(
                "optimizers: must have no scheduler, as it belongs to another optimizer; set lr_scheduler_type, or "
                "override create_scheduler"
            )
        if self.model_init is not None:
            raise ArgumentError("model_init: must be left out; give the model, one private run for each")
        for name in REPLACED:
            if getattr(type(self), name, None) is not getattr(Trainer, name, None):
                raise ArgumentError(
                    f"{type(self).__name__}.{name}: must not be overridden, as a private step does not call it; a loss "
                    "of your own is compute_loss_func"
                )
        if getattr(self.data_collator, "padding_free", False):
            raise ArgumentError(
                "data_collator with padding_free=True: must give every text its own row of one length, as with "
                "packing=False and pad_to_multiple_of, and not join texts"
            )
        counted = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if counted != self.args.world_size:
            raise ArgumentError(
                f"use_cpu={self.args.use_cpu!r}: must be True if there is no GPU, since transformers counts "
                f"{self.args.world_size} processes and torch.distributed {counted}, and each would write all files"
            )
        if self.accelerator.mixed_precision != ("bf16" if self.args.bf16 else "no"):
            raise ArgumentError(
                f"mixed_precision={self.accelerator.mixed_precision!r} of accelerate: must be 'no'; give "
                "TrainingArguments(bf16=True) instead"
            )
        if "loss" in self._chosen and self.compute_loss_func is not None:
            raise ArgumentError("loss: must be left out with compute_loss_func")

    @property
    def private(self) -> PrivateRun:
        """The private run, from the begin of `train` on: its plan, epsilon and statement."""
        if self._private is None:
            raise PrivacyError("trainer.private: the run is made by trainer.train()")
        return self._private

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refuse: each trial would be a private run of its own, and their choice another release."""
        raise PrivacyError(
            "hyperparameter_search: every trial spends epsilon; make a PrivateTrainer for each, with one ledger="
        )

    def _output(self) -> AbstractContextManager[None]:
        """While the run trains: the method's output, which is evaluated and saved."""
        return self._private.averaged() if self._private is not None and self.is_in_train else nullcontext()

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns that a collator reads for the model, and the mark of packed rows, which is looked for."""
        known = self._signature_columns
        super()._set_signature_columns_if_needed()
        if known is None:
            self._signature_columns += ["seq_lengths", *getattr(self.model, "columns", ())]

    @contextmanager
    def _inner_model(self) -> Iterator[None]:
        """Save and load the language model of `dpcore.torch.preferences`, as `from_pretrained` reads it."""
        whole = self.model
        self.model = whole.language_model if isinstance(whole, Pairs) else whole
        try:
            yield
        finally:
            self.model = whole

    def _save(self, *arguments: Any, **options: Any) -> None:
        """Write the model's files."""
        with self._inner_model():
            super()._save(*arguments, **options)

    def _load_from_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Load the files of a checkpoint."""
        with self._inner_model():
            super()._load_from_checkpoint(*arguments, **options)

    def _load_best_model(self) -> None:
        """Load the files of the best checkpoint."""
        with self._inner_model():
            super()._load_best_model()

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate or predict with the method's output."""
        with self._output():
            return super().evaluation_loop(*arguments, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the method's output, as `from_pretrained` reads it, with its statement and card; call in every process.

        A card from elsewhere is kept. A checkpoint has neither: it has the run's keys, and must not be published.
        """
        with self._output():
            super().save_model(output_dir, _internal_call)
        if _internal_call or self._private is None or not self.is_world_process_zero():
            return
        target = Path(output_dir or self.args.output_dir)
        statement = self._statement()
        if statement is None:
            sentence = f"{target}: saved without a privacy statement, as the run has no target_delta="
            warnings.warn(sentence, TrainingWarning, stacklevel=2)
            return
        saved = {path.name: path.read_bytes() for path in sorted(target.glob("*.safetensors"))}
        counted = {"parameters": sum(p.numel() for p in self._private.model.parameters())}
        contents, card = stated(statement, saved, trained=counted), target / "README.md"
        kept = {"README.md"} if card.exists() and not card.read_text(encoding="utf-8").startswith(METADATA) else set()
        write(target, {name: content for name, content in contents.items() if name not in saved.keys() | kept})

    def _statement(self) -> Statement | None:
        """Return the run's statement, None without a target delta."""
        return None if self._chosen.get("target_delta") is None else self.private.statement()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of data that was not trained on."""
        named = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        self._check_other(self.eval_dataset if named is None else named)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader of data that was not trained on."""
        self._check_other(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _check_other(self, dataset: Any) -> None:
        named = dataset.values() if type(dataset) is dict else [dataset]
        if any(overlapping(self.train_dataset, each) for each in named):
            raise PrivacyError(
                "eval_dataset: must not be train_dataset or a part of it, as loss and predictions on training data are "
                "private; evaluate on data that was not trained on"
            )

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """Write Trainer's card, with the privacy statement in the place of settings that the method rules."""
        super().create_model_card(*arguments, **options)
        if not self.is_world_process_zero() or self._private is None or (statement := self._statement()) is None:
            return
        card = Path(self.args.output_dir) / "README.md"
        wrong = ("- learning_rate:", "- train_batch_size:", "- total_train_batch_size:", "- optimizer:")
        kept = [line for line in card.read_text().splitlines() if not line.startswith(wrong)]
        card.write_text("\n".join([*kept, "", "### Privacy", "", "```text", statement.text().rstrip(), "```", ""]))

    def _trained(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the run's state in the process that writes; all of them have parts of it.

        The parameters are those from which the run continues. The model's own files have the method's output, which
        differs if the method averages.
        """
        state = self.private.optimizer.state_dict()
        if self.args.should_save:
            whole = {"parameters": self._trained(), "optimizer": state, "lr_scheduler": self.lr_scheduler.state_dict()}
            save_state(Path(output_dir) / FILE, whole)

    def _load_run(self, folder: str, private: PrivateRun) -> TrainerState:
        """Continue from a checkpoint, and return Trainer's own state at that step."""
        path, trained = Path(folder) / FILE, self._trained()
        if not path.exists():
            raise ArgumentError(
                f"resume_from_checkpoint={folder!r}: has no {FILE}, so its releases are not known; must "
                "be a checkpoint of a PrivateTrainer without save_only_model"
            )
        saved = read_state(path)
        state = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))
        if saved["parameters"].keys() != trained.keys():
            raise ArgumentError(f"resume_from_checkpoint={folder!r}: trains other parameters than this model")
        for name, value in trained.items():
            value.copy_(saved["parameters"][name])
        private.optimizer.load_state_dict(saved["optimizer"])
        self.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        if state.global_step != private.steps_taken:
            raise ArgumentError(
                f"resume_from_checkpoint={folder!r}: {TRAINER_STATE_NAME} is of step {state.global_step} and {FILE} of "
                f"step {private.steps_taken}; must be of one checkpoint"
            )
        return state

    def _save_rng_state(self, output_dir: str) -> None:
        """Save no generators: the draws of training follow from the run's keys."""

    def _begin(self, resume_from_checkpoint: str | None) -> PrivateRun:
        """Make the run, or take the one that is there, and load a checkpoint into it."""
        if self._private is not None and resume_from_checkpoint is None and self._private.steps_taken:
            raise PrivacyError(
                f"train(): this trainer's run took {self._private.steps_taken} steps already; give "
                "resume_from_checkpoint, or make a new PrivateTrainer, which is a run with an epsilon of its own"
            )
        if self.train_dataset is None:
            raise ArgumentError("train_dataset=None: must be given to train")
        self._set_training_mode()
        if self._private is None or resume_from_checkpoint is None:
            if self._private is not None:
                self._private.close()  # a run without a step gives back what it reserved
            args, (data, collate) = self.args, data_of(self)
            length = {"steps": args.max_steps} if args.max_steps > 0 else {"epochs": int(args.num_train_epochs)}
            options = {"loss": loss_of(self), "num_workers": args.dataloader_num_workers, "collate_fn": collate}
            options |= {"precision": "bf16" if args.bf16 else None, **self._chosen, **length}
            self._private = make_private(self.model, data, self._method, **options)
        private = self._private
        self.optimizer, self.lr_scheduler = private.optimizer, None
        self.create_scheduler(num_training_steps=private.plan.steps, optimizer=self.optimizer)
        callbacks = [
            one for one in [*self.callback_handler.callbacks, self.control] if isinstance(one, ExportableState)
        ]
        self.state = TrainerState(stateful_callbacks=callbacks)
        if resume_from_checkpoint is not None:
            self.state = self._load_run(resume_from_checkpoint, private)
            self._load_callback_state()
        state, epochs = self.state, math.ceil(private.plan.steps / len(private.loader))
        state.max_steps, state.num_train_epochs = private.plan.steps, epochs
        state.train_batch_size = private.plan.batch_size  # the expected one
        state.compute_steps(self.args, state.max_steps)
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()
        self._logged = state.global_step
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = private.loader
        return private

    def _set_training_mode(self) -> None:
        """Put the model into training mode, but for BatchNorm that is frozen in evaluation mode."""
        frozen = frozen_norms(self.model)
        self.model.train()
        for module in frozen:
            module.eval()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of the plan; `Trainer.train` calls it."""
        self.is_in_train = True
        private, ignored = self._begin(resume_from_checkpoint), ignore_keys_for_eval
        handler = self.callback_handler
        self.control = handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start:
            self._evaluate(trial, ignored, skip_scheduler=True)
        try:
            while private.steps_taken < private.plan.steps:
                self.control = handler.on_epoch_begin(self.args, self.state, self.control)
                if self._epoch(private, trial, ignored):
                    break
        except BaseException:
            # Whoever interrupts has seen evaluations, and a callback may raise because of one, as to prune a trial.
            private.stopped_by_results |= 0 < private.steps_taken < private.plan.steps
            raise
        return self._finish(private)

    def _epoch(self, private: PrivateRun, trial: Any, ignored: list[str] | None) -> bool:
        """Take the steps up to the end of the epoch, and return whether training stops."""
        handler, length = self.callback_handler, len(private.loader)
        first, batches = private.steps_taken, iter(private.loader)
        stop = False
        for _ in range(min(length - first % length, private.plan.steps - first)):
            self.control = handler.on_step_begin(self.args, self.state, self.control)
            if not self.model.training:
                self._set_training_mode()
            try:
                batch = next(batches)
            except BudgetError as reason:
                if not private.steps_taken:
                    raise
                warnings.warn(
                    f"training ends after {private.steps_taken} steps: {reason}", RuntimeWarning, stacklevel=2
                )
                stop, self.control.should_save = True, self.args.save_strategy != "no"
                break
            private.step(batch)
            del batch
            self.control = handler.on_optimizer_step(self.args, self.state, self.control)
            rate = self._get_learning_rate()
            if "metrics" not in inspect.signature(self.lr_scheduler.step).parameters:  # those wait for an evaluation
                self.lr_scheduler.step()
            self.state.global_step = private.steps_taken
            self.state.epoch = private.steps_taken / length
            self.control = handler.on_step_end(self.args, self.state, self.control)
            self._log_evaluate_save(private, trial, ignored, rate)
            # One process cannot stop alone: the others would wait for its sum.
            if private.any_process(self.control.should_training_stop or self.control.should_epoch_stop):
                break
        self.control = handler.on_epoch_end(self.args, self.state, self.control)
        self._log_evaluate_save(private, trial, ignored, self._get_learning_rate())
        return self._stopped(private) or stop

    def _stopped(self, private: PrivateRun) -> bool:
        """Return whether a callback of any process ends training: it has seen the evaluations."""
        stopped = private.any_process(self.control.should_training_stop)
        private.stopped_by_results |= stopped and private.steps_taken < private.plan.steps
        return stopped

    def _log_evaluate_save(self, private: PrivateRun, trial: Any, ignored: list[str] | None, rate: float) -> None:
        """Log, evaluate and save as the callbacks decided, in Trainer's order."""
        if self.control.should_log and self._logged != self.state.global_step:
            self._logged = self.state.global_step
            self.log({"learning_rate": rate, **self._spent(private)})
        if self.control.should_evaluate:
            best = self._determine_best_metric(metrics=self._evaluate(trial, ignored), trial=trial)
            if self.args.save_strategy == "best":
                self.control.should_save = best
        if self.control.should_save:
            self._stopped(private)  # before the state is saved, which says so
            self._save_checkpoint(self.model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _spent(self, private: PrivateRun) -> dict[str, float]:
        """Return epsilon and delta, in the first process: it has the ledger, and it is the one that logs.

        "epsilon" is of the steps so far, and holds if their number was fixed beforehand. After a stop that depends on
        results it is that of the plan.
        """
        delta = self._chosen.get("target_delta")
        if delta is None or not self.is_world_process_zero():
            return {}
        return {"epsilon": private.epsilon(), "epsilon_planned": private.epsilon(planned=True), "delta": delta}

    def _finish(self, private: PrivateRun) -> TrainOutput:
        """Leave the method's output, or the best checkpoint, in the model, and end the run's account."""
        method = private.plan.method
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        elif method.averaging is not None or method.update.rule == "accelerated":
            self.model.load_state_dict(private.output_state_dict())
        private.close()
        metrics = {"train_steps": private.steps_taken, **self._spent(private)}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._finish_current_push()
        self.is_in_train = False
        return TrainOutput(private.steps_taken, math.nan, metrics)
