"""Fine-tuning of language models: one gradient for each example or pair, beside autograd of its own tokens alone."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpcore
from dpcore.errors import ArgumentError, ArgumentTypeError, TrainingWarning
from dpcore.sampling import PoissonSampler, UserSampler
from dpcore.torch import make_private
from dpcore.torch.data.packed import MARKS, PACKED
from dpcore.torch.preferences import DPO, PAIRS, Compared, RewardPairs, paired, with_reference
from tests.unit.torch.gradients.one_by_one import proved, randomized, rows

# Of those packages to each other.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LENGTHS = torch.tensor([[7, 5], [4, 7], [6, 6]])  # of both texts of three pairs
PROMPTS = torch.tensor([2, 3, 1])
WORDS, TIMES = 19, 7
METHOD = dpcore.methods.dp_sgd(lr=0.1, batch_size=2, noise_multiplier=1.0)
Gradients = list[list[Tensor]]


def language_model(kind: str = "ForCausalLM", adapters: bool = False) -> Any:
    """Return a tiny Llama in float64, its parameters moved off their starting values."""
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=16, pad_token_id=0, num_labels=1,
    )  # fmt: skip
    model = getattr(transformers, f"Llama{kind}")(config)
    if adapters:
        peft = pytest.importorskip("peft", exc_type=ImportError)
        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", lora_dropout=0.0)
        )
    return randomized(model, size=0.3).train()


def pairs() -> dict[str, Tensor]:
    """Return three pairs of texts, with a prompt in common, answers of other lengths, and padding."""
    torch.manual_seed(1)
    ids, places = torch.randint(1, WORDS, (3, 2, TIMES)), torch.arange(TIMES)
    asked, there = places < PROMPTS[:, None, None], places < LENGTHS[..., None]
    ids = torch.where(asked, ids[:, :1], ids) * there
    return {"input_ids": ids, "attention_mask": there.long(), "completion_mask": (there & ~asked).long()}


def tokens(data: Mapping[str, Tensor], pair: int, place: int) -> Tensor:
    """Return a text without its padding."""
    return data["input_ids"][pair, place, : LENGTHS[pair, place]]


def log_probability(model: nn.Module, text: Tensor, prompt: int) -> Tensor:
    """Return the log-probability of the tokens after the prompt, added up token by token."""
    found = model(input_ids=text[None]).logits[0].log_softmax(1)
    return torch.stack([found[place - 1, text[place]] for place in range(prompt, len(text))]).sum()


def by_autograd(model: nn.Module, losses: list[Tensor]) -> Gradients:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [list(torch.autograd.grad(loss, trained, retain_graph=True, materialize_grads=True)) for loss in losses]


def check(module: nn.Module, data: Mapping[str, Tensor], wanted: Gradients) -> None:
    """Compare the rows of the proved graph, for all examples and for the first alone; Llama's norms are in float32."""
    gradient = proved(module, lambda output: output.loss, data)
    for count in (len(wanted), 1):
        found = rows(gradient, {name: value[:count] for name, value in data.items()})
        for place, tensors in enumerate(zip(*wanted, strict=True)):
            for row, right in zip(found[place], tensors[:count], strict=True):
                torch.testing.assert_close(row, right.flatten(), rtol=1e-4, atol=1e-6)
    assert all(max(tensor.abs().max() for tensor in example) > 0.01 for example in wanted)


@pytest.mark.parametrize("adapters", [False, True])
def test_dpo_gives_each_pair_the_gradient_of_its_own_formula(adapters: bool) -> None:
    model = language_model(adapters=adapters)
    data = with_reference(model, pairs(), batch_size=2)
    if not adapters:
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)  # the model moved on; with adapters it differs from the reference anyway
    losses = []
    for i, prompt in enumerate(PROMPTS.tolist()):
        chosen, rejected = (log_probability(model, tokens(data, i, k), prompt) for k in (0, 1))
        ahead = 0.3 * (chosen - data["ref_chosen_logps"][i] - rejected + data["ref_rejected_logps"][i])
        losses.append(-0.9 * F.logsigmoid(ahead) - 0.1 * F.logsigmoid(-ahead))
    check(DPO(model, beta=0.3, label_smoothing=0.1), data, by_autograd(model, losses))


class Table(list[dict[str, Any]]):
    """A dataset that takes columns, as that of Hugging Face."""

    def add_column(self, name: str, values: list[float]) -> "Table":
        return Table([{**row, name: value} for row, value in zip(self, values, strict=True)])


def test_the_reference_is_the_model_before_it_is_trained_or_without_its_adapters() -> None:
    model = language_model(adapters=True)
    model.get_submodule("base_model.model.lm_head").eval()
    modes = [module.training for module in model.modules()]
    data = with_reference(model, pairs())
    assert modes == [module.training for module in model.modules()]
    with torch.no_grad(), model.disable_adapter():
        for i, prompt in enumerate(PROMPTS.tolist()):
            for k, name in enumerate(("ref_chosen_logps", "ref_rejected_logps")):
                right = log_probability(model, tokens(data, i, k), prompt)
                torch.testing.assert_close(data[name][i], right)
    listed = [{name: value[i] for name, value in pairs().items()} for i in range(3)]
    found = with_reference(model, listed, batch_size=2)
    assert [one["ref_chosen_logps"] for one in found] == pytest.approx(data["ref_chosen_logps"].tolist())
    assert with_reference(model, Table(listed)) == found
    assert not DPO(model)(**data).margins.allclose(torch.zeros(3, dtype=torch.float64))


def test_rewards_give_each_pair_the_gradient_of_its_own_formula() -> None:
    model = language_model("ForSequenceClassification")
    data = {**pairs(), "margin": torch.tensor([0.0, 0.5, -1.0])}
    del data["completion_mask"]
    losses = []
    for i in range(3):
        chosen, rejected = (model(input_ids=tokens(data, i, k)[None]).logits.sum() for k in (0, 1))
        losses.append(-F.logsigmoid(chosen - rejected - data["margin"][i]))
    check(RewardPairs(model), data, by_autograd(model, losses))


def test_masked_prompts_leave_the_mean_over_an_examples_own_answer() -> None:
    """Lengths of answers differ: a mean over the tokens of a batch would weigh the examples by them."""
    model, data = language_model(), pairs()
    ids, answers = data["input_ids"][:, 1], data["completion_mask"][:, 1]
    given = {"input_ids": ids, "attention_mask": data["attention_mask"][:, 1], "labels": ids.where(answers != 0, -100)}
    losses = [-log_probability(model, tokens(data, i, 1), prompt) / (LENGTHS[i, 1] - prompt)
              for i, prompt in enumerate(PROMPTS.tolist())]  # fmt: skip
    check(model, given, by_autograd(model, losses))


def test_an_example_without_a_token_to_learn_from_adds_nothing() -> None:
    """It is masked as a whole, or its one token has none before it. Other masked words change no bit of the run."""
    ids = pairs()["input_ids"][:, 0]
    one = torch.tensor([[5] + [0] * (TIMES - 1)])
    results = []
    for masked in (torch.full((1, TIMES), 3), torch.full((1, TIMES), 7)):
        model = language_model().float()
        data = {"input_ids": torch.cat([ids, one, masked]),
                "labels": torch.cat([ids, one.where(one != 0, -100), torch.full_like(masked, -100)])}  # fmt: skip
        with pytest.warns(TrainingWarning, match=r"data\['labels'\]: some examples have labels of -100 alone"):
            run = make_private(
                model, data, dpcore.methods.dp_sgd(lr=0.1, batch_size=5, noise_multiplier=1.0), target_delta=1e-3,
                steps=1, loss=lambda output: output.loss, sampling="fixed-order", key=bytes(range(32)), exact_key=True,
            )  # fmt: skip
        for batch in run.loader:
            run.step(batch)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*results, strict=True))


class Answer(NamedTuple):
    logits: Tensor


class Bag(nn.Module):
    """The least that is called like a model of transformers: it answers with the same words everywhere."""

    def __init__(self, labels: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, labels or WORDS)
        self.labels = labels

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        found = self.words(input_ids)
        return Answer(found if self.labels is None else found.mean(1))


class Halves(nn.Module):
    """Pairs as other libraries batch them: all chosen texts, and then all rejected ones."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Bag(1)

    def forward(self, input_ids: Tensor) -> Compared:
        chosen, rejected = self.model(input_ids).logits.squeeze(1).chunk(2)
        return Compared(-F.logsigmoid(chosen - rejected).mean(), chosen - rejected)


def private(model: nn.Module, data: Any, **options: Any) -> Any:
    given = {"steps": 1, "target_delta": 1e-3, "loss": lambda output: output.loss, **options}
    return make_private(model, data, METHOD, **given)


def test_a_batch_whose_halves_are_pairs_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Halves"):
        private(Halves(), {"input_ids": pairs()["input_ids"].flatten(0, 1)})


def test_the_statement_says_that_a_pair_is_the_unit() -> None:
    data = with_reference(Bag(), pairs())
    data["ref_chosen_logps"] -= 100  # as of a long text; no remark asks to scale it
    run = private(DPO(Bag()), data)
    assert PAIRS in run.statement().caveats
    other = private(Bag(1), pairs()["input_ids"][:, 0], loss=lambda output: output.logits.sum())
    assert PAIRS not in other.statement().caveats


def collator(examples: list[Any], length: int) -> dict[str, Tensor]:
    """TRL's for preferences, with what it does in a few lines."""
    texts = [[*one["prompt_ids"], *one[name]] for name in ("chosen_ids", "rejected_ids") for one in examples]
    prompts = [len(one["prompt_ids"]) for one in examples] * 2
    length = length or max(map(len, texts))
    return {
        "input_ids": torch.tensor([text + [0] * (length - len(text)) for text in texts]),
        "completion_mask": torch.tensor(
            [[int(p <= t < len(x)) for t in range(length)] for x, p in zip(texts, prompts, strict=True)]
        ),
        **{name: torch.tensor([one[name] for one in examples]) for name in examples[0] if name.startswith("ref_")},
    }  # fmt: skip


LISTED = [{"prompt_ids": [1, 2], "chosen_ids": [3] * (1 + i), "rejected_ids": [4, 5]} for i in range(3)]


def test_a_collator_of_halves_becomes_one_of_pairs() -> None:
    joined = paired(partial(collator, length=6))
    found = joined(LISTED)
    assert found["input_ids"].shape == (3, 2, 6)
    assert found["input_ids"][2].tolist() == [[1, 2, 3, 3, 3, 0], [1, 2, 4, 5, 0, 0]]
    data = with_reference(Bag(), LISTED, joined)
    run = private(DPO(Bag()), data, collate_fn=joined)
    for batch in run.loader:
        assert batch["ref_chosen_logps"].shape == (len(batch["input_ids"]),)
        run.step(batch)
    with pytest.raises(ArgumentError, match="disagree about the number of examples"):
        private(DPO(Bag()), data, collate_fn=partial(collator, length=6))
    with pytest.raises(ArgumentError, match="pad every example to one fixed length"):
        with_reference(Bag(), LISTED, paired(partial(collator, length=0)))


def test_pairs_that_say_little_are_remarked_on() -> None:
    data = pairs()
    data["input_ids"][1, 0, 0] += 1
    data["completion_mask"][2, 1] = 0
    with pytest.warns(TrainingWarning) as told:
        with_reference(Bag(), data)
    said = [str(one.message) for one in told]
    assert ["different prompts" in said[1], "have no answer" in said[0], len(said)] == [True, True, 2]
    assert not any(character.isdigit() for character in said[1])
    # Padding on the left is no part of a prompt.
    left = {name: torch.stack([value[:, 0], value[:, 1].roll(2, -1)], 1) for name, value in pairs().items()}
    with pytest.warns(TrainingWarning, match="prompts"):
        with_reference(Bag(), {name: left[name][1:2] for name in ("input_ids", "completion_mask")})
    with_reference(Bag(), {name: value[:1] for name, value in left.items()})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DPO("model"), "model='str': must be a torch.nn.Module"),
        (lambda: DPO(Bag(), beta=0), "beta=0"),
        (lambda: DPO(Bag(), label_smoothing=0.5), r"label_smoothing=0.5: must be in \[0, 1/2\)"),
        (lambda: private(DPO(Bag()), pairs()), "ref_chosen_logps, ref_rejected_logps: must be columns"),
        (lambda: private(RewardPairs(Bag(1)), {"input_ids": pairs()["input_ids"][:, 0]}),
         r"input_ids of shape \(B, 7\): must be \(B, 2, T\)"),
        (lambda: private(RewardPairs(Bag(2)), {"input_ids": pairs()["input_ids"]}), r"must be \(B, 1\), one reward"),
        (lambda: with_reference(Bag(), {"input_ids": pairs()["input_ids"]}), "must have the fields input_ids and"),
        (lambda: with_reference(Bag(), pairs(), batch_size=0), "batch_size=0"),
        (lambda: with_reference(Bag(), {**pairs(), "completion_mask": pairs()["completion_mask"][:, :1]}),
         "completion_mask: must have the shape of input_ids"),
    ],
)  # fmt: skip
def test_nonsense_is_one_sentence(make: Any, words: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        make()


def test_packed_rows_need_a_user_for_each() -> None:
    packed = [{"input_ids": torch.tensor([1, 2, 3]), "seq_lengths": [1, 2]} for _ in range(4)]
    options: dict[str, Any] = {
        "collate_fn": lambda rows: torch.stack([row["input_ids"] for row in rows]),
        "loss": lambda output: output.logits.sum(),
    }
    with pytest.raises(ArgumentError, match=r"'seq_lengths': has rows of several packed texts.*UserSampler"):
        private(Bag(1), packed, **options)
    with pytest.raises(ArgumentError, match="packed texts"):
        private(Bag(1), {"input_ids": torch.ones(4, 3).long(), min(MARKS): torch.ones(4, 2)})
    with pytest.raises(ArgumentError, match="packed texts"):
        private(Bag(1), torch.utils.data.Subset(packed, [0, 1, 2]), **options)  # type: ignore[arg-type]
    users = UserSampler(PoissonSampler(dataset_size=3, batch_size=2), [0, 0, 1, 2], max_examples_per_user=2)
    run = private(Bag(1), packed, **options, sampling=users)
    assert PACKED in run.statement().caveats
    assert math.isfinite(run.epsilon())
