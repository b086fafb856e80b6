"""Models of transformers in `dpcore train`: weights from the folder, a loss that is theirs, refusals by name."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", exc_type=ImportError)
pytest.importorskip("typer")

from dpcore.cli.compare import made_up_text  # noqa: E402
from dpcore.cli.datasets import TextDataset, load  # noqa: E402
from dpcore.cli.train import language  # noqa: E402
from dpcore.cli.train.settings import Settings  # noqa: E402
from dpcore.cli.train.training import BEGUN, Training  # noqa: E402
from dpcore.errors import ArgumentError, DataError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of those packages to each other

LENGTH = made_up_text.LENGTH


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {
        name: tmp_path_factory.mktemp(name) for name in ("roberta-base", "gpt2", "bert-tiny", "sst-2", "dart", "arxiv")
    }
    for name in ("roberta-base", "gpt2", "bert-tiny"):
        made_up_text.model(name, found[name])
    for name in ("sst-2", "dart", "arxiv"):
        made_up_text.texts(name, found[name], (40, 40))
    return found


def settings(folders: dict[str, Path], data: str, model: str, **more: Any) -> tuple[Settings, TextDataset]:
    given = {"data": data, "data_dir": str(folders[data]), "model_dir": str(folders[model]), "max_length": LENGTH}
    made = Settings(**{"model": "pretrained", "epsilon": 1.0, **given, **more})
    found = load(*made.source)
    assert isinstance(found, TextDataset)
    return made, found


@pytest.mark.parametrize(("data", "model"), [("dart", "gpt2"), ("arxiv", "bert-tiny")])
def test_the_loss_of_a_text_is_that_of_transformers(folders: dict[str, Path], data: str, model: str) -> None:
    given, found = settings(folders, data, model)
    net = language.build(given, found).eval()
    ids, targets = torch.tensor(found.test_inputs[:1]), torch.tensor(found.test_targets[:1])
    labels = targets
    if data == "dart":  # transformers shifts the labels itself
        labels = torch.cat([torch.full((1, 1), -100), targets[:, :-1]], dim=1)
        assert targets[0, -1] == -100
    kind = getattr(transformers, {"dart": "GPT2LMHeadModel", "arxiv": "BertForMaskedLM"}[data])
    theirs = kind.from_pretrained(folders[model]).eval()
    mask = (ids != found.pad).long()
    expected = theirs(input_ids=ids.long(), attention_mask=mask, labels=labels).loss
    ours = language.token_loss(net(ids), targets)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(language.METRICS["test_loss"](net(ids), targets), expected)
    right = (theirs(input_ids=ids.long(), attention_mask=mask).logits.argmax(-1) == targets)[targets != -100]
    assert language.METRICS["test_accuracy"](net(ids), targets) == right.double().mean()


def test_padding_changes_nothing_and_texts_are_weighted_alike(folders: dict[str, Path]) -> None:
    net = language.build(*settings(folders, "dart", "gpt2")).eval()
    short, _ = settings(folders, "dart", "gpt2")
    found, fewer = load(*short.source), load(*replace(short, max_length=LENGTH - 2).source)
    pairs = [(torch.tensor(of.test_inputs[:4]), torch.tensor(of.test_targets[:4])) for of in (found, fewer)]
    of_all, cut = (language.METRICS["test_loss"](net(ids), targets) for ids, targets in pairs)
    torch.testing.assert_close(of_all, cut)
    ids, targets = pairs[0]
    alone = [language.token_loss(net(ids[i : i + 1]), targets[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(of_all, torch.stack(alone).mean())


def test_the_end_of_a_first_text_is_seen_where_padding_has_its_id(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["gpt2"], tmp_path / "gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["gpt2"])
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "gpt2")
    given, found = settings({**folders, "gpt2": tmp_path / "gpt2"}, "dart", "gpt2")
    ids, targets = torch.tensor(found.test_inputs[:1]), torch.tensor(found.test_targets[:1])
    end = (ids[0] == found.pad).nonzero()[0]
    assert targets[0, end] != -100  # from which on the second text is predicted
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folders["gpt2"]).eval()
    torch.testing.assert_close(language.build(given, found).eval()(ids), theirs(input_ids=ids.long()).logits)


def test_all_but_the_head_comes_from_the_folder(folders: dict[str, Path]) -> None:
    given, found = settings(folders, "sst-2", "roberta-base")
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made.append(language.build(given, found).state_dict())
    saved = transformers.AutoModelForMaskedLM.from_pretrained(folders["roberta-base"]).state_dict()
    inner = [name for name in made[0] if name.startswith("net.roberta.")]
    assert all(torch.equal(made[2][name], saved[name.removeprefix("net.")]) for name in inner)
    heads = made[0].keys() - set(inner)
    assert all(torch.equal(made[0][name], made[1][name]) for name in heads)
    assert not torch.equal(made[0]["net.classifier.dense.weight"], made[2]["net.classifier.dense.weight"])


def test_adapters_and_the_head_are_all_that_is_trained(folders: dict[str, Path]) -> None:
    pytest.importorskip("peft", exc_type=ImportError)
    net = language.build(*settings(folders, "sst-2", "roberta-base", lora=2))
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name or "classifier" in name for name in trained)
    assert {p.shape[0] for name, p in net.named_parameters() if "lora_A" in name} == {2}


def test_a_folder_that_does_not_fit_is_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    given, found = settings(folders, "sst-2", "roberta-base")
    for changed, sentence in (
        ({"model": "roberta-large"}, "kind roberta, width 8, 1 layers, not roberta-large; take its folder, or"),
        ({"model_dir": str(tmp_path)}, "has no config.json of a model that transformers knows"),
    ):
        with pytest.raises(DataError, match=sentence):
            language.build(replace(given, **changed), found)
    longer = load(*replace(given, max_length=40).source)
    assert isinstance(longer, TextDataset)
    with pytest.raises(DataError, match="max_length=40: is more than the model in"):
        language.build(given, longer)
    with pytest.raises(DataError, match="its tokenizer has more tokens than the 15 of its model"):
        language.build(given, replace(found, tokens=16))
    language.build(given, replace(found, train_inputs=found.train_inputs + 15))  # private texts are not looked at
    inner = transformers.AutoModel.from_pretrained(folders["bert-tiny"])
    inner.save_pretrained(tmp_path)
    masked = settings(folders, "arxiv", "bert-tiny")
    with pytest.raises(DataError, match=r"lacks weights of BertForMaskedLM, such as cls\."):
        language.build(replace(masked[0], model_dir=str(tmp_path)), masked[1])


@pytest.mark.parametrize(("data", "model"), [("sst-2", "roberta-base"), ("dart", "gpt2"), ("arxiv", "bert-tiny")])
def test_examples_are_proved_apart_and_the_statement_says_where_it_began(
    folders: dict[str, Path], data: str, model: str
) -> None:
    training = Training(*settings(folders, data, model, batch_size=8, delta=1e-3))
    assert training.private.explain().way == "pairs"
    assert training.remarks == []
    assert BEGUN in training.statement(0).caveats


@pytest.mark.parametrize(("more", "sentence"), [
    ({"data": "sst-2"}, "model='logistic': must be roberta-base, .* or pretrained for data='sst-2'"),
    ({"model": "gpt2"}, "model='gpt2': must be logistic, .* or efficientnet-b0 for data='digits'"),
    ({"model_dir": "x"}, "model_dir='x': is only for the models roberta-base"),
    ({"lora": 4}, "lora=4: is only for the models"),
    ({"data": "sst-2", "model": "gpt2", "max_length": 1}, "max_length=1"),
    ({"data": "sst-2", "model": "gpt2", "lora": 0}, "lora=0"),
])  # fmt: skip
def test_settings_of_texts_go_together(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        Settings(epsilon=1.0, **more)
