"""`PrivateTrainer` beside a plain loop of dpcore: what it trains, saves, logs, refuses, and goes on from."""

import copy
import hashlib
import json
import math
import random
import stat
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import dpcore
import dpcore.torch
from dpcore.errors import ArgumentError, BudgetError, DataError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.statement import Statement
from dpcore.statement.card import listed
from dpcore.statement.text import format_epsilon
from tests.depth import chosen
from tests.forks import as_torchrun_does

transformers = pytest.importorskip("transformers", exc_type=ImportError)
accelerate = pytest.importorskip("accelerate", exc_type=ImportError)

from dpcore.torch.data.data import Reader  # noqa: E402
from dpcore.torch.hosts import PrivateTrainer, arguments, hugging_face  # noqa: E402
from dpcore.torch.hosts.arguments import check_arguments  # noqa: E402

# Warnings of those packages to each other.
pytestmark = pytest.mark.filterwarnings("ignore")

PRIVATE: dict[str, Any] = {
    "target_delta": 1e-3, "key": bytes(range(32)), "exact_key": True, "microbatch_size": 16
}  # fmt: skip
ADAM: dict[str, Any] = {"lr": 0.01, "batch_size": 8}
PUBLIC = {"learning_rate", "epsilon", "epsilon_planned", "delta", "epoch", "step", "train_steps"}


def model(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def examples(count: int, seed: int) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    return [
        {"input_ids": torch.randint(1, 37, (6,)), "attention_mask": torch.ones(6, dtype=torch.long), "labels": i % 3}
        for i in range(count)
    ]


TRAIN, HELD_OUT = examples(40, 1), examples(12, 2)


def settings(folder: Path, **options: Any) -> Any:
    given = {"num_train_epochs": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, **options}
    return transformers.TrainingArguments(str(folder), **given)


def trainer(folder: Path, method: Any = None, *, net: Any = None, kind: Any = PrivateTrainer, **options: Any) -> Any:
    """Return a trainer; `options` are shared out between the training arguments and the trainer."""
    known = {entry.name for entry in fields(transformers.TrainingArguments)}
    given = {name: options.pop(name) for name in list(options) if name in known}
    method = method or dpcore.methods.dp_adam(noise_multiplier=1.0, **ADAM)
    options = {"train_dataset": TRAIN, "eval_dataset": HELD_OUT, **PRIVATE, **options}
    return kind(model() if net is None else net, settings(folder, **given), method=method, **options)


def plain_loop(net: Any, method: Any, stop: int | None = None, **options: Any) -> Any:
    """The same run without a Trainer: a linear schedule, as TrainingArguments have it by default."""
    given = {"loss": lambda output: output.loss, "collate_fn": transformers.default_data_collator, **options}
    run = dpcore.torch.make_private(net.train(), TRAIN, method, epochs=2, **PRIVATE, **given)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 - step / run.plan.steps)
    while run.steps_taken < (run.plan.steps if stop is None else stop):
        for batch in run.loader:
            run.step(batch)
            scheduler.step()
            if run.steps_taken == stop:
                break
    return run


def assert_same(net: Any, other: Any) -> None:
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=0, atol=0)


class Stop(transformers.TrainerCallback):
    """Ends training at a step, as an early stop does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


class Broken(transformers.TrainerCallback):
    """Fails after a step was reserved, as data that cannot be read do."""

    works = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        if not self.works:
            next(iter(train_dataloader))
            raise ValueError("before the step")


@pytest.fixture(scope="module")
def looped() -> Any:
    """The run of a plain loop by the method that a trainer has by default."""
    return plain_loop(model(), dpcore.methods.dp_adam(noise_multiplier=1.0, **ADAM))


def test_it_trains_what_a_plain_loop_trains(tmp_path: Path, looped: Any):
    run, found = looped, trainer(tmp_path)
    output = found.train()
    assert_same(found.model, run.model)
    assert found.private.epsilon() == run.epsilon()
    assert output.global_step == run.steps_taken == 10
    spent = {"epsilon": run.epsilon(), "epsilon_planned": run.epsilon(), "delta": 1e-3}
    assert output.metrics == {"train_steps": 10, **spent}
    assert math.isnan(output.training_loss)


def test_bf16_is_the_precision_of_the_run_and_of_evaluations(tmp_path: Path, looped: Any):
    """Accelerate puts a cast around the model's forward pass at the first evaluation, which changes no gradient."""
    net, method = model(), dpcore.methods.dp_adam(noise_multiplier=1.0, **ADAM)
    run = plain_loop(net, method, precision="bf16")
    found = trainer(tmp_path, method, bf16=True, eval_strategy="steps", eval_steps=3)
    found.train()
    assert found.private.explain().autocast == run.explain().autocast == "to bfloat16"
    assert_same(found.model, net)
    with pytest.raises(AssertionError):
        assert_same(looped.model, net)


def test_a_collators_own_generator_is_found_where_labels_are_taken_out(tmp_path: Path):
    class Noisy:
        def __init__(self) -> None:
            self.generator = random.Random(0)

        def __call__(self, rows: list[Any]) -> Any:
            return transformers.default_data_collator(rows)

    collator = Noisy()
    found = trainer(tmp_path, compute_loss_func=lambda out, labels, num_items_in_batch: labels, data_collator=collator)
    reader = Reader(*hugging_face.data_of(found), torch.device("cpu"))
    reader.find_generators()
    assert reader.generators == [collator.generator]


def test_a_loss_of_outputs_and_labels(tmp_path: Path):
    def own(output: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        assert num_items_in_batch is None or not torch.is_grad_enabled()
        return torch.nn.functional.cross_entropy(output.logits, labels, label_smoothing=0.1)

    def parted(rows: list[Any]) -> Any:
        inputs = transformers.default_data_collator(rows)
        return inputs, inputs.pop("labels")

    net, method = model(), dpcore.methods.dp_sgd(lr=0.1, batch_size=8, noise_multiplier=1.0)
    plain_loop(net, method, loss=own, collate_fn=parted)
    found = trainer(tmp_path, method, compute_loss_func=own)
    found.train()
    torch.testing.assert_close(found.model.state_dict(), net.state_dict(), rtol=1e-4, atol=1e-5)
    assert found.evaluate()["eval_loss"] > 0

    def of_outputs(output: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        assert labels is None  # as Trainer has it
        return output.logits.square().mean()

    rows = [{name: value for name, value in row.items() if name != "labels"} for row in TRAIN]
    trainer(tmp_path, method, train_dataset=rows, compute_loss_func=of_outputs, max_steps=1, save_strategy="no").train()


def logged(folder: Path) -> set[str]:
    """All keys of the logs below a folder."""
    found: set[str] = set()
    for file in folder.rglob("trainer_state.json"):
        state = json.loads(file.read_text())
        assert state["total_flos"] == state["num_input_tokens_seen"] == 0
        assert state["train_batch_size"] == 8  # the expected one
        found.update(*(entry.keys() for entry in state["log_history"]))
    return found


def tags(folder: Path) -> set[str]:
    """All tags of the event files below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = folder.rglob("events.out.*")
    return {tag for file in files for tag in EventAccumulator(str(file)).Reload().Tags()["scalars"]}


def test_nothing_private_is_computed_logged_or_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))

    def private(*_: Any, **__: Any) -> Any:
        raise AssertionError("a private quantity was asked for")

    names = ("training_step", "floating_point_ops", "_track_num_input_tokens", "_clip_grad_norm", "get_batch_samples")
    for name in names:
        assert hasattr(transformers.Trainer, name)
        monkeypatch.setattr(transformers.Trainer, name, private)
    seen: list[dict[str, Any]] = []

    class Listener(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    found = trainer(
        tmp_path, logging_steps=1, save_steps=4, report_to="tensorboard", callbacks=[Listener()], disable_tqdm=False
    )
    output = found.train()
    assert set().union(*seen, output.metrics) <= PUBLIC
    assert [entry["epsilon"] for entry in seen] == sorted(entry["epsilon"] for entry in seen)
    rates = [entry["learning_rate"] for entry in seen if "learning_rate" in entry]
    assert rates == pytest.approx([0.01 * (1 - step / 10) for step in range(10)])
    assert logged(tmp_path) == PUBLIC - {"train_steps"}
    assert {tag.partition("/")[2] for tag in tags(tmp_path)} == PUBLIC - {"step"}
    folder = tmp_path / "checkpoint-8"
    assert {file.name for file in folder.iterdir()} == {
        "config.json", "dpcore.pt", "model.safetensors", "trainer_state.json", "training_args.bin"
    }  # fmt: skip
    assert "loss" not in capsys.readouterr().out


def test_evaluation_prediction_and_the_card(tmp_path: Path):
    found = trainer(tmp_path, eval_strategy="steps", eval_steps=5, logging_steps=5, compute_metrics=right)
    found.train()
    assert [entry["step"] for entry in found.state.log_history if "eval_right" in entry] == [5, 10]
    assert found.predict(HELD_OUT).predictions.shape == (12, 3)
    assert found.evaluate()["eval_right"] == found.evaluate(examples(12, 2))["eval_right"]
    for call in (found.evaluate, found.predict):
        with pytest.raises(PrivacyError, match="must not be train_dataset"):
            call(TRAIN)
    found.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert found.private.statement().text().splitlines()[0] in card
    assert "AdamW" not in card
    assert "- learning_rate" not in card


def test_a_saved_model_has_its_statement_and_card(tmp_path: Path):
    found = trainer(tmp_path / "run", max_steps=2, save_strategy="no")
    found.train()
    out = tmp_path / "out"
    for _ in range(2):
        found.save_model(str(out))
    assert Statement.from_json((out / "statement.json").read_text()) == found.private.statement()
    assert (out / "statement.txt").read_text() == found.private.statement().text()
    digests = listed((out / "README.md").read_text(encoding="utf-8"))
    assert sorted(digests) == ["model.safetensors", "statement.json", "statement.txt"]
    assert digests["model.safetensors"] == hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    (out / "README.md").write_text("mine")
    found.save_model(str(out))
    assert (out / "README.md").read_text() == "mine"
    without = trainer(tmp_path / "other", max_steps=1, save_strategy="no", target_delta=None)
    without.train()
    with pytest.warns(
        dpcore.errors.TrainingWarning, match="without a privacy statement, as the run has no target_delta"
    ):
        without.save_model(str(tmp_path / "none"))


def test_text_of_varying_length_is_told_how_to_pad(tmp_path: Path):
    rows = [{name: value[: 3 + i % 3] if name != "labels" else value for name, value in row.items()}
            for i, row in enumerate(TRAIN)]  # fmt: skip
    with pytest.raises(ArgumentError, match=r'DataCollatorWithPadding\(tok, padding="max_length", max_length=N\)'):
        trainer(tmp_path, train_dataset=rows, save_strategy="no").train()


def right(prediction: Any) -> dict[str, float]:
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_it_stops_early_and_loads_the_best(tmp_path: Path):
    found = trainer(
        tmp_path, eval_strategy="steps", eval_steps=2, save_steps=2, logging_steps=2, load_best_model_at_end=True,
        greater_is_better=True, metric_for_best_model="loss", lr_scheduler_type="reduce_lr_on_plateau",
        callbacks=[transformers.EarlyStoppingCallback(1), Stop(8)],
    )  # fmt: skip
    output = found.train()
    assert found.private.steps_taken < 10
    # Results decided when to stop, so that the epsilon of the steps taken is no claim.
    planned = found.private.epsilon(planned=True)
    spent = {"epsilon": planned, "epsilon_planned": planned, "delta": 1e-3}
    assert output.metrics == {"train_steps": found.private.steps_taken, **spent}
    during = [entry for entry in found.state.log_history if "learning_rate" in entry]
    assert all(entry["epsilon"] < entry["epsilon_planned"] == planned for entry in during)
    found.create_model_card()
    card = " ".join((tmp_path / "README.md").read_text().split())
    assert f"private with epsilon = {format_epsilon(planned)} and delta" in card
    best = type(found.model).from_pretrained(found.state.best_model_checkpoint)
    assert_same(found.model, best)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_who_interrupts_has_seen_results(tmp_path: Path, kind: type[BaseException]):
    class Pruned(transformers.TrainerCallback):
        def on_evaluate(self, *_: Any, **__: Any) -> None:
            raise kind("not good enough")

    found = trainer(tmp_path, eval_strategy="steps", eval_steps=4, save_strategy="no", callbacks=[Pruned()])
    with pytest.raises(kind):
        found.train()
    assert found.private.steps_taken == 4
    assert found.private.epsilon() == found.private.epsilon(planned=True)
    found.save_model(str(tmp_path / "out"))
    text = " ".join((tmp_path / "out/statement.txt").read_text().split())
    assert "Results decided to stop after 4 of 10 planned steps" in text


def test_a_checkpoint_goes_on(tmp_path: Path, looped: Any):
    first = trainer(tmp_path, save_steps=3, callbacks=[Stop(7)], logging_steps=1)
    first.train()
    folder = tmp_path / "checkpoint-6"
    assert stat.S_IMODE((folder / "dpcore.pt").stat().st_mode) == 0o600
    state = torch.load(folder / "dpcore.pt", weights_only=True)
    assert state["optimizer"]["dpcore"]["public"]["step"] == 6

    second = trainer(tmp_path, net=model(), logging_steps=1, save_steps=3)
    begun: list[Any] = []
    second.create_scheduler = lambda **options: begun.append(1) or PrivateTrainer.create_scheduler(second, **options)
    second.train(resume_from_checkpoint=True)
    assert begun
    assert second.private.steps_taken == second.state.global_step == 10
    rates = [entry["learning_rate"] for entry in second.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.01 * (1 - step / 10) for step in range(10)])
    assert second.private.epsilon() == pytest.approx(looped.epsilon())
    # The first six steps are those of the first process; what follows drew fresh noise.
    six = model()
    plain_loop(six, first._method, stop=6)
    for name, value in state["parameters"].items():
        torch.testing.assert_close(value, six.get_parameter(name).detach(), rtol=0, atol=0)
    assert not torch.equal(second.model.classifier.weight, looped.model.classifier.weight)

    with pytest.raises(PrivacyError, match="took 10 steps already"):
        second.train()
    again = trainer(tmp_path, net=model(), save_steps=3)
    (folder / "trainer_state.json").write_text((tmp_path / "checkpoint-3/trainer_state.json").read_text())
    with pytest.raises(ArgumentError, match=r"of step 3 and dpcore\.pt of step 6"):
        again.train(resume_from_checkpoint=str(folder))
    file = folder / "dpcore.pt"
    content = bytearray(file.read_bytes())
    place = content.index(state["optimizer"]["dpcore"]["secret"]["noise_key"].encode())
    content[place] = ord("1" if content[place] == ord("0") else "0")  # the key is one, still
    file.chmod(0o600)
    file.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        again.train(resume_from_checkpoint=str(folder))
    file.unlink()
    with pytest.raises(ArgumentError, match=r"has no dpcore\.pt"):
        again.train(resume_from_checkpoint=str(folder))


def test_the_methods_output_is_evaluated_saved_and_left_in_the_model(tmp_path: Path):
    averaging = dpcore.averaging.ExponentialAverage(0.9)
    method = dpcore.methods.dp_sgd(lr=0.1, batch_size=8, noise_multiplier=1.0, averaging=averaging)
    five, ten = model(), model()
    run, whole = plain_loop(five, method, stop=5), plain_loop(ten, method)
    trained, output = copy.deepcopy(five.state_dict()), run.output_state_dict()
    assert not torch.equal(trained["classifier.weight"], output["classifier.weight"])
    found = trainer(tmp_path, method, eval_strategy="steps", eval_steps=5, save_steps=5)
    found.train()
    saved = type(five).from_pretrained(tmp_path / "checkpoint-5").state_dict()
    torch.testing.assert_close(saved, output, rtol=0, atol=0)
    five.load_state_dict(output)
    wanted = transformers.Trainer(five, settings(tmp_path), eval_dataset=HELD_OUT).evaluate()["eval_loss"]
    assert next(entry for entry in found.state.log_history if "eval_loss" in entry)["eval_loss"] == wanted
    torch.testing.assert_close(found.model.state_dict(), whole.output_state_dict(), rtol=0, atol=0)
    again = trainer(tmp_path, method, net=model(), callbacks=[Stop(0)])
    again.create_scheduler = lambda **options: again_checked(again, trained, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert again.private.steps_taken == 6


def again_checked(again: Any, trained: dict[str, torch.Tensor], **options: Any) -> Any:
    """Hear of the values that the first step begins at."""
    real = again.private.step

    def step(batch: Any) -> None:
        torch.testing.assert_close(again.model.state_dict(), trained, rtol=0, atol=0)
        real(batch)

    again.private.step = step
    return PrivateTrainer.create_scheduler(again, **options)


@pytest.mark.parametrize("reentrant", chosen([True], [True, False]))
def test_gradient_checkpoints_change_nothing(tmp_path: Path, reentrant: bool):
    net = model(0.0)
    method = dpcore.methods.dp_sgd(lr=0.1, batch_size=8, noise_multiplier=1.0)
    plain_loop(net, method)
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    found = trainer(tmp_path, method, net=model(0.0), gradient_checkpointing=True, **options)
    found.train()
    torch.testing.assert_close(found.model.state_dict(), net.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_budget_ends_training_in_good_order(tmp_path: Path):
    ledger = Ledger.create(str(tmp_path / "people.ledger"), budget=(3.0, 1e-3), accept_file_system=True)
    found = trainer(tmp_path, ledger=ledger, data_id="people", save_steps=100)
    with pytest.warns(RuntimeWarning, match="training ends after"):
        found.train()
    assert 0 < found.private.steps_taken < 10
    assert ledger.total().fixed <= 3.0
    assert (tmp_path / f"checkpoint-{found.private.steps_taken}/dpcore.pt").exists()


def test_after_a_batch_that_could_not_be_read_the_next_try_trains_or_says_why_not(tmp_path: Path):
    path = str(tmp_path / "people.ledger")
    ledger = Ledger.create(path, budget=(3.0, 1e-3), accept_file_system=True)
    method, options = dpcore.methods.dp_adam(**ADAM), {"ledger": ledger, "key": None, "exact_key": False}
    found = trainer(tmp_path, method, target_epsilon=3.0, save_strategy="no", **options)
    found.add_callback(broken := Broken())
    with pytest.raises(ValueError, match="before the step"):
        found.train()
    broken.works = True
    found.train()
    assert found.private.steps_taken == 10
    again = trainer(tmp_path, method, target_epsilon=1.0, **options)
    with pytest.raises(BudgetError, match="kept whole"):
        again.train()


# fmt: off
REFUSED: list[tuple[str, Any, str]] = [
    ("learning_rate", 0.5, r"learning_rate=0.5: must be the method's lr=0.01, or be left out \(5e-05\)"),
    ("max_grad_norm", 0.0, r"max_grad_norm=0.0: must be the method's max_grad_norm=1.0"),
    ("adam_beta1", 0.5, r"adam_beta1=0.5: must be the method's betas\[0\]=0.9"),
    ("per_device_train_batch_size", 16, "=16, gradient_accumulation_steps=1: must give the method's batch_size=8"),
    ("gradient_accumulation_steps", 4, "gradient_accumulation_steps=4: must give the method's batch_size=8"),
    ("optim", "sgd", "optim='sgd': must be left at 'adamw_torch_fused'; the update is the method's"),
    ("fp16", True, r"fp16=True: must be left at False; its loss scale follows from gradients"),
    ("bf16_full_eval", True, "evaluate a copy"),
    ("neftune_noise_alpha", 5.0, "neftune_noise_alpha=5.0: must be left at None; it adds noise to embeddings"),
    ("auto_find_batch_size", True, "limited by max_memory"),
    ("include_num_input_tokens_seen", True, "include_num_input_tokens_seen='all': must be left at 'no'"),
    ("dataloader_drop_last", True, "drawn by sampling="),
    ("enable_jit_checkpoint", True, "save_steps"),
    ("data_seed", 3, "secret key"),
    ("torch_empty_cache_steps", 5, "torch_empty_cache_steps=5: must be left at None; a private run does not know it"),
    ("num_train_epochs", 1.5, "num_train_epochs=1.5: must be a whole number; or give max_steps"),
]
# fmt: on


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_arguments_that_contradict_are_refused(tmp_path: Path, name: str, value: Any, words: str):
    method = dpcore.methods.dp_adam(noise_multiplier=1.0, **ADAM)
    with pytest.raises(ArgumentError, match=words) as refusal:
        check_arguments(settings(tmp_path, **{name: value}), transformers.TrainingArguments, method, processes=1)
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_field_is_kept_or_refused_and_none_is_ignored(tmp_path: Path):
    """Also a field that these tables have never heard of, as the next version may bring."""
    method, kind = dpcore.methods.dp_adam(**ADAM), transformers.TrainingArguments
    names = {entry.name for entry in fields(kind)}
    refused = names - arguments.KEPT - set(arguments.COUNTED)
    assert len(refused) > 30
    for name in refused:
        given = settings(tmp_path)
        object.__setattr__(given, name, "something else")
        with pytest.raises(ArgumentError, match=f"^{name}='something else'"):
            check_arguments(given, kind, method, processes=1)
    tables = (arguments.KEPT, arguments.COUNTED, arguments.OF_THE_METHOD, arguments.REASONS)
    assert sum(map(len, tables)) == len(set().union(*tables))


def test_what_agrees_with_the_method_is_taken(tmp_path: Path):
    method = dpcore.methods.dp_adam(lr=0.5, batch_size=32, max_grad_norm=2.0, weight_decay=0.1, betas=(0.8, 0.99))
    given = settings(
        tmp_path, learning_rate=0.5, max_grad_norm=2.0, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.99,
        per_device_train_batch_size=4, gradient_accumulation_steps=4,
    )  # fmt: skip
    check_arguments(given, transformers.TrainingArguments, method, processes=2)
    with pytest.raises(ArgumentError, match="in 1 processes, not 16"):
        check_arguments(given, transformers.TrainingArguments, method, processes=1)
    sgd = dpcore.methods.dp_sgd(lr=0.5, batch_size=32)
    with pytest.raises(ArgumentError, match=r"adam_beta1=0.8: must be a method with betas\[0\]"):
        check_arguments(settings(tmp_path, adam_beta1=0.8), transformers.TrainingArguments, sgd, processes=1)


def test_schedules_checkpoints_and_devices_that_contradict(tmp_path: Path):
    kind = transformers.TrainingArguments
    schedule = dpcore.schedules.WarmupCosine(warmup_steps=2)
    method = dpcore.methods.dp_adam(schedule=schedule, **ADAM)
    with pytest.raises(ArgumentError, match="lr_scheduler_type='linear': must be 'constant'"):
        check_arguments(settings(tmp_path), kind, method, processes=1)
    check_arguments(settings(tmp_path, lr_scheduler_type="constant"), kind, method, processes=1)
    plain = dpcore.methods.dp_adam(**ADAM)
    given = settings(tmp_path, push_to_hub=True, hub_strategy="checkpoint")
    with pytest.raises(ArgumentError, match="hub_strategy='checkpoint': must be 'end' or 'every_save'"):
        check_arguments(given, kind, plain, processes=1)
    given = settings(tmp_path)
    given._n_gpu = 2
    with pytest.raises(ArgumentError, match="n_gpu=2"):
        check_arguments(given, kind, plain, processes=1)


class OwnLoss(PrivateTrainer):
    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        return super().compute_loss(*arguments, **options)


def test_pieces_that_a_private_step_replaces_are_refused(tmp_path: Path):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"fp16": True}, "fp16=True"),  # the table is asked
        ({"optimizers": (optimizer, None)}, "the update is the method's"),
        ({"optimizers": (None, scheduler)}, "lr_scheduler_type"),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, "the update is the method's"),
        ({"kind": OwnLoss}, "OwnLoss.compute_loss: must not be overridden"),
        ({"epochs": 2}, "num_train_epochs"),
        ({"steps": 2}, "max_steps"),
        ({"data": TRAIN}, "train_dataset"),
        ({"collate_fn": len}, "data_collator"),
        ({"loss": len, "compute_loss_func": len}, "loss: must be left out"),
    ]
    for options, words in cases:
        with pytest.raises(ArgumentError, match=words):
            trainer(tmp_path, **options)
    with pytest.raises(ArgumentError, match="model_init"):
        PrivateTrainer(None, settings(tmp_path), model_init=lambda: net, method=dpcore.methods.dp_adam(**ADAM))
    with pytest.raises(TypeError, match=r"method='adam': must be a dpcore\.Method"):
        trainer(tmp_path, "adam")
    found = trainer(tmp_path)
    with pytest.raises(PrivacyError, match=r"made by trainer.train\(\)"):
        _ = found.private
    with pytest.raises(PrivacyError, match="hyperparameter_search"):
        found.hyperparameter_search()
    with pytest.raises(ArgumentError, match="train_dataset=None"):
        trainer(tmp_path, train_dataset=None).train()


def test_frozen_statistics_stay_frozen(tmp_path: Path):
    class Pictures(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(5).eval().requires_grad_(False)
            self.head = torch.nn.Linear(5, 3)

        def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            logits = self.head(self.norm(pixels))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    data, held_out = ([{"pixels": torch.rand(5), "labels": torch.tensor(i % 3)} for i in range(n)] for n in (40, 8))
    found = trainer(tmp_path, net=Pictures(), train_dataset=data, eval_dataset=held_out, eval_strategy="epoch")
    found.train()
    assert found.private.steps_taken == 10
    assert found.state.log_history[-1]["train_steps"] == 10


def in_a_process(rank: int, folder: Path) -> None:
    """Train to where the first of two asks to stop, then go on from a checkpoint."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    first = trainer(folder, net=model(0.0), save_steps=4, callbacks=[Stop(6 + rank)], eval_strategy="epoch")
    assert first.args.world_size == 2
    first.train()
    assert first.private.steps_taken == 6
    if first.is_world_process_zero():
        torch.save(first.model.state_dict(), folder / "six.pt")
    again = trainer(folder, net=model(0.0))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert again.private.steps_taken == 10
    again.save_model()


def test_processes_that_transformers_does_not_count_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a machine without GPUs, without `use_cpu`: each process would take itself for the first."""
    net = model()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(ArgumentError, match=r"use_cpu=True.* counts 1 processes and torch\.distributed 2"):
        trainer(tmp_path, net=net)


@pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")
def test_several_processes_train_one_model(tmp_path: Path):
    as_torchrun_does(2, in_a_process, tmp_path)
    alone = trainer(tmp_path / "alone", net=model(0.0), callbacks=[Stop(6)])
    alone.train()
    torch.testing.assert_close(torch.load(tmp_path / "six.pt"), alone.model.state_dict(), rtol=1e-5, atol=1e-6)
    assert {name for name in logged(tmp_path) if name[:5] != "eval_"} <= PUBLIC
    assert (tmp_path / "model.safetensors").exists()
