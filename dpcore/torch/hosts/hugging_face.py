"""`PrivateTrainer`: the Trainer of transformers, with a private step in the place of its own."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.stages.method import Method
from dpcore.torch.data.overlap import overlapping
from dpcore.torch.hosts import resuming
from dpcore.torch.hosts.arguments import check_arguments
from dpcore.torch.hosts.private_loop import PrivateLoop
from dpcore.torch.make_private import make_private
from dpcore.torch.run import PrivateRun
from dpcore.torch.wrong_arguments import check_method

FORWARDED = frozenset(inspect.signature(make_private).parameters) - {"model", "method"}
TAKEN = {
    "data": "train_dataset",
    "epochs": "TrainingArguments(num_train_epochs=...)",
    "steps": "TrainingArguments(max_steps=...)",
    "collate_fn": "data_collator",
}
REPLACED = ("compute_loss", "create_optimizer", "create_optimizer_and_scheduler", "get_batch_samples",
            "get_train_dataloader", "optimizer_step", "training_step")  # fmt: skip


class PrivateTrainer(PrivateLoop):
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

    `dpcore.torch.hosts.private_loop` has the loop.
    """

    def __init__(self, *arguments: Any, method: Method, **options: Any) -> None:
        check_method(method)
        for name in sorted(TAKEN.keys() & options.keys()):
            raise ArgumentError(f"{name}: must be given as {TAKEN[name]}")
        chosen = {name: options.pop(name) for name in sorted(FORWARDED & options.keys())}
        super().__init__(*arguments, method=method, chosen=chosen, **options)
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
        counted = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if counted != self.args.world_size:
            raise ArgumentError(
                f"use_cpu={self.args.use_cpu!r}: must be True where there is no GPU, since transformers counts "
                f"{self.args.world_size} processes and torch.distributed {counted}, and each would write all files"
            )
        if self.accelerator.mixed_precision != "no":
            raise ArgumentError(
                f"mixed_precision={self.accelerator.mixed_precision!r} of accelerate: must be 'no'; give the model its "
                "dtype instead"
            )
        if "loss" in self._chosen and (self.compute_loss_func is not None or self.label_smoother is not None):
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

    def _output(self) -> AbstractContextManager[None]:
        """While the run trains: the method's output, which is what is evaluated and saved."""
        return self._private.averaged() if self._private is not None and self.is_in_train else nullcontext()

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate or predict with the method's output."""
        with self._output():
            return super().evaluation_loop(*arguments, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the method's output, as `from_pretrained` reads it, with its statement and card; call in every process.

        A card of another's making is kept. A checkpoint has neither: it holds the run's keys, and stays where it is.
        """
        with self._output():
            super().save_model(output_dir, _internal_call)
        if not _internal_call and self._private is not None and self.is_world_process_zero():
            resuming.state_beside(output_dir or self.args.output_dir, self._private)

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
        if self.is_world_process_zero() and self._private is not None:
            resuming.state_in_card(self.args.output_dir, self._private)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        resuming.save(output_dir, self.model, self.private, self.lr_scheduler, writes=self.args.should_save)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save no generators: what training draws follows from the run's keys."""
