"""`PrivateTrainer`: the Trainer of transformers, with a private step in the place of its own."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from dpcore.errors import ArgumentError, ArgumentTypeError, BudgetError, PrivacyError
from dpcore.stages.method import Method
from dpcore.torch.hosts import resuming
from dpcore.torch.hosts.arguments import check_arguments
from dpcore.torch.hosts.hugging_face_data import data_of, loss_of
from dpcore.torch.make_private import make_private
from dpcore.torch.run import PrivateRun

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
    tokens, where Trainer takes that over all tokens of the batch.

    The loop is short and our own: Trainer's reads a loss, a gradient norm and counts of tokens in the middle of it. Of
    what surrounds it, `train`, `evaluation_loop`, `_save_checkpoint` and the callbacks are used as they are.
    """

    def __init__(self, *arguments: Any, method: Method, **options: Any) -> None:
        if not isinstance(method, Method):
            raise ArgumentTypeError(f"method={method!r}: must be a dpcore.Method, as dpcore.methods.dp_adam(...) returns")
        for name in sorted(TAKEN.keys() & options.keys()):
            raise ArgumentError(f"{name}: must be given as {TAKEN[name]}")
        self._method = method
        self._options = {name: options.pop(name) for name in sorted(FORWARDED & options.keys())}
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
        if self.accelerator.mixed_precision != "no":
            raise ArgumentError(
                f"mixed_precision={self.accelerator.mixed_precision!r} of accelerate: must be 'no'; give the model its "
                "dtype instead"
            )
        if "loss" in self._options and (self.compute_loss_func is not None or self.label_smoother is not None):
            raise ArgumentError("loss: must be left out with compute_loss_func or label_smoothing_factor")

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
        if self._private is None:
            args, (data, collate) = self.args, data_of(self)
            length = {"steps": args.max_steps} if args.max_steps > 0 else {"epochs": int(args.num_train_epochs)}
            options = {"loss": loss_of(self), "prefetch": args.dataloader_num_workers, **self._options, **length}
            self._private = make_private(self.model, data, self._method, collate_fn=collate, **options)
        private = self._private
        self.optimizer, self.lr_scheduler = private.optimizer, None
        self.create_scheduler(num_training_steps=private.plan.steps, optimizer=self.optimizer)
        callbacks = [one for one in [*self.callback_handler.callbacks, self.control] if isinstance(one, ExportableState)]
        self.state = TrainerState(stateful_callbacks=callbacks)
        if resume_from_checkpoint is not None:
            self.state = resuming.load(resume_from_checkpoint, self.model, private, self.lr_scheduler)
            self._load_callback_state()
        state, epochs = self.state, math.ceil(private.plan.steps / len(private.loader))
        state.max_steps, state.num_train_epochs = private.plan.steps, epochs
        state.train_batch_size = self._method.batch_size
        state.compute_steps(self.args, state.max_steps)
        state.is_local_process_zero, state.is_world_process_zero = (
            self.is_local_process_zero(),
            self.is_world_process_zero(),
        )
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = private.loader
        return private

    def _set_training_mode(self) -> None:
        """Put the model into training mode, but for what is frozen in evaluation mode: BatchNorm with fixed statistics."""
        normal = torch.nn.modules.batchnorm._BatchNorm
        modules = [module for module in self.model.modules() if isinstance(module, normal) and not module.training]
        self.model.train()
        for module in modules:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                module.eval()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of the plan: what `Trainer.train` calls."""
        self.is_in_train = True
        private, told = self._begin(resume_from_checkpoint), ignore_keys_for_eval
        handler = self.callback_handler
        self.control = handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start:
            self._evaluate(trial, told, skip_scheduler=True)
        while private.steps_taken < private.plan.steps:
            self.control = handler.on_epoch_begin(self.args, self.state, self.control)
            if self._epoch(private, trial, told):
                break
        return self._finish(private)

    def _epoch(self, private: PrivateRun, trial: Any, told: list[str] | None) -> bool:
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
                warnings.warn(f"training ends after {private.steps_taken} steps: {reason}", RuntimeWarning, stacklevel=2)
                stop = self.control.should_save = True
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
            self._log_evaluate_save(private, trial, told, rate)
            # One process alone cannot stop: the others would wait for its sum.
            stop = private.any_process(self.control.should_training_stop)
            if stop or private.any_process(self.control.should_epoch_stop):
                break
        self.control = handler.on_epoch_end(self.args, self.state, self.control)
        self._log_evaluate_save(private, trial, told, self._get_learning_rate())
        return stop or private.any_process(self.control.should_training_stop)

    def _log_evaluate_save(self, private: PrivateRun, trial: Any, told: list[str] | None, rate: float) -> None:
        """Do what the callbacks asked for, in Trainer's order."""
        if self.control.should_log and self._logged != self.state.global_step:
            self._logged = self.state.global_step
            self.log({"learning_rate": rate, **self._spent(private)})
        if self.control.should_evaluate:
            best = self._determine_best_metric(metrics=self._evaluate(trial, told), trial=trial)
            if self.args.save_strategy == "best":
                self.control.should_save = best
        if self.control.should_save:
            self._save_checkpoint(self.model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _spent(self, private: PrivateRun) -> dict[str, float]:
        """Return epsilon and delta, in the first process: it has the ledger, and it is the one that logs."""
        delta = self._options.get("target_delta")
        return {} if delta is None or not self.is_world_process_zero() else {"epsilon": private.epsilon(), "delta": delta}

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

    def _output(self) -> AbstractContextManager[None]:
        """While the run trains: the method's output, which is what is evaluated and saved."""
        return self._private.averaged() if self._private is not None and self.is_in_train else nullcontext()

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate or predict with the method's output."""
        with self._output():
            return super().evaluation_loop(*arguments, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the method's output, as `from_pretrained` reads it; call it in every process."""
        with self._output():
            super().save_model(output_dir, _internal_call)

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
        if dataset is self.train_dataset:
            raise PrivacyError(
                "eval_dataset: must not be train_dataset, as loss and predictions on training data are private; "
                "evaluate on data that was not trained on"
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        resuming.save(output_dir, self.model, self.private, self.lr_scheduler, writes=self.args.should_save)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save no generators: what training draws follows from the run's keys."""
