"""What a checkpoint folder of transformers holds of a private run: one file, with the run's keys in it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from dpcore.errors import ArgumentError, DataError, TrainingWarning
from dpcore.spec.whole_file import whole_file
from dpcore.statement.card import METADATA, model_card
from dpcore.torch.run import PrivateRun
from dpcore.torch.state.checkpoint import save_state

FILE: Final = "dpcore.pt"
"""Readable by its owner alone: whoever has it can subtract the noise."""


def save(folder: str, model: nn.Module, private: PrivateRun, scheduler: Any, *, writes: bool) -> None:
    """Write the run's state in the process that writes; all of them have parts of it.

    The parameters are those that the run goes on from. The model's own files hold the method's output, which is
    another one where the method averages.
    """
    state = private.optimizer.state_dict()
    if writes:
        trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
        whole = {"parameters": trained, "optimizer": state, "lr_scheduler": scheduler.state_dict()}
        save_state(Path(folder) / FILE, whole)


def load(folder: str, model: nn.Module, private: PrivateRun, scheduler: Any) -> TrainerState:
    """Go on from what `save` wrote, and return Trainer's own state at that step.

    Raises
    ------
    ArgumentError
        If the folder holds no private run, or that of another model or step.
    DataError
        If the file cannot be read.
    """
    path = Path(folder) / FILE
    if not path.exists():
        raise ArgumentError(
            f"resume_from_checkpoint={folder!r}: has no {FILE}, without which what was released is not known; must be "
            "a checkpoint of a PrivateTrainer without save_only_model"
        )
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, EOFError, RuntimeError, ValueError, LookupError) as cause:
        raise DataError(f"checkpoint {path}: cannot be read, or is damaged") from cause
    state = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if saved["parameters"].keys() != trained.keys():
        raise ArgumentError(f"resume_from_checkpoint={folder!r}: trains other parameters than this model")
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(saved["parameters"][name])
    private.optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["lr_scheduler"])
    if state.global_step != private.steps_taken:
        raise ArgumentError(
            f"resume_from_checkpoint={folder!r}: {TRAINER_STATE_NAME} is of step {state.global_step} and {FILE} of "
            f"step {private.steps_taken}; must be of one checkpoint"
        )
    return state


def state_beside(folder: str, private: PrivateRun) -> None:
    """Write the statement and the card of a saved model beside it, as `dpcore.torch.export` does."""
    target = Path(folder)
    try:
        statement = private.statement()
    except ArgumentError:  # no target_delta
        told = f"{target}: saved without a privacy statement, as the run has no target_delta="
        warnings.warn(told, TrainingWarning, stacklevel=3)
        return
    contents = {"statement.json": (statement.to_json() + "\n").encode(), "statement.txt": statement.text().encode()}
    for name, content in contents.items():
        with whole_file(target / name) as file:
            file.write(content)
    card = target / "README.md"
    if card.exists() and not card.read_text(encoding="utf-8").startswith(METADATA):
        return
    saved = {path.name: path.read_bytes() for path in sorted(target.glob("*.safetensors"))}
    counted = {"parameters": sum(p.numel() for p in private.model.parameters())}
    with whole_file(card) as file:
        file.write(model_card(statement, trained=counted, files={**saved, **contents}).encode())


def state_in_card(folder: str, private: PrivateRun) -> None:
    """Put the statement into a model card, and take out the settings in it that training did not go by."""
    card = Path(folder) / "README.md"
    wrong = ("- learning_rate:", "- train_batch_size:", "- total_train_batch_size:", "- optimizer:")
    kept = [line for line in card.read_text().splitlines() if not line.startswith(wrong)]
    try:
        text = private.statement().text()
    except ArgumentError:  # no target_delta
        return
    card.write_text("\n".join([*kept, "", "### Privacy", "", "```text", text.rstrip(), "```", ""]))
