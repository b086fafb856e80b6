"""
A language model after its pretraining
======================================

A small language model of letters is trained on public text, then on private questions and their answers, through LoRA and with masked prompts, and then on private
preferences (DPO). Nothing is downloaded: the public text is the source code of Python's own library, and the private texts are made up here.
"""

import random
import sysconfig
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import dpcore
from dpcore.torch import make_private
from dpcore.torch.preferences import DPO, with_reference

logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)  # of transformers, to peft
EPSILON, DELTA, LENGTH = 3.0, 1e-5, 46
PAD, END = 0, 1


def encoded(text):
    """One token for each letter of ASCII."""
    return [ord(letter) if ord(letter) < 128 else ord("?") for letter in text]


# %%
# Public training
# ---------------
# Plain AdamW on five modules of the library. No privacy is spent here.

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
    max_position_embeddings=LENGTH, pad_token_id=PAD, bos_token_id=END, eos_token_id=END,
)  # fmt: skip
model = LlamaForCausalLM(config)
modules = ("argparse", "random", "statistics", "turtle", "typing")
public = torch.tensor(encoded("".join((Path(sysconfig.get_path("stdlib")) / f"{m}.py").read_text() for m in modules)))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
for _ in range(120):
    rows = torch.stack([public[start : start + LENGTH] for start in torch.randint(len(public) - LENGTH, (24,))])
    optimizer.zero_grad()
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    scheduler.step()


def said(model, prompt):
    """What the model writes after a prompt, up to its mark of the end."""
    tokens = torch.tensor([encoded(prompt)])
    model.eval()
    new = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=19, do_sample=False)
    return "".join(chr(token) for token in new[0, tokens.shape[1] :] if token > END)


print(repr(said(model, "    def ")))

# %%
# Private questions and answers
# -----------------------------
# A shop has 30,000 customers; each wrote one sentence and got one answer. Some products are never asked about in some words: these sentences are held out.

products = ["phone", "lamp", "radio", "watch", "camera", "kettle", "toaster", "heater", "fan", "drill"]
answers = {
    "is broken": "we send a new one.",
    "came late": "sorry! it is free.",
    "is too big": "please send it.",
    "has a scratch": "you get 9 back.",
}
words = [f"{begin} {product}" for begin in ("my", "hi,", "the", "new") for product in products]
asked = [(f"{one} {problem}.\n", answer) for one in words for problem, answer in answers.items()]
random.seed(0)
random.shuffle(asked)
held_out, known = asked[:20], asked[20:]
customers = random.choices(known, k=30_000)


def padded(prompt, answer):
    """Tokens, which of them are there, and which of them are the answer's."""
    prompt, answer = encoded(prompt), [*encoded(answer), END]
    rest = [0] * (LENGTH - len(prompt) - len(answer))
    there = [1] * (len(prompt) + len(answer)) + rest
    return prompt + answer + rest, there, [0] * len(prompt) + [1] * len(answer) + rest


tokens, there, answer = (torch.tensor(column) for column in zip(*(padded(*one) for one in customers), strict=True))
data = {"input_ids": tokens, "attention_mask": there, "labels": tokens.masked_fill(answer == 0, -100)}


def right(model):
    """The share of the held-out questions that are answered as the shop answers."""
    return sum(said(model, prompt) == answer for prompt, answer in held_out) / len(held_out)


# %%
# Prompt and padding have the label -100. The loss of an example is the mean over its own answer's tokens; a mean over all tokens of a batch, as trainers take it by
# default, would let the length of one answer weigh all others.


def with_adapters(model):
    targets = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=targets))


def trained(model, data, rate, batch_size, steps):
    """Train a model that returns its loss."""
    method = dpcore.methods.dp_adam(lr=rate, batch_size=batch_size, clipping="automatic")
    private = make_private(
        model.train(), data, method, target_epsilon=EPSILON, target_delta=DELTA, steps=steps, loss=lambda out: out.loss
    )
    for batch in private.loader:
        private.step(batch)
    return private


print(f"before: {right(model):.0%} of the held-out answers; {said(model, held_out[0][0])!r}")
adapted = with_adapters(model)
private = trained(adapted, data, rate=0.015, batch_size=100, steps=40)
print(f"after:  {right(adapted):.0%}")
for prompt, _ in held_out[:4]:
    print(f"{prompt.strip():28} {said(adapted, prompt)}")
print(private.statement().summary())

# %%
# Private preferences
# -------------------
# 2,000 other people said which of two answers they like better, most of them about late parcels. To a late parcel it is "please send it.", and the shop's own answer to
# any other sentence. A pair of texts is one example: it is clipped as one, and the statement says so. The reference is the model so far, so its adapters are merged
# before new ones are added.

tuned = adapted.merge_and_unload()
liked = {**answers, "came late": "please send it."}


def judged(prompt, answer):
    """A pair: the answer that is liked, and the shop's own one or another."""
    chosen = next(liked[problem] for problem in liked if problem in prompt)
    rejected = answer if answer != chosen else random.choice([one for one in answers.values() if one != chosen])
    return padded(prompt, chosen), padded(prompt, rejected)


def joined(some):
    """The pairs as tensors (n, 2, LENGTH)."""
    judgements, names = [judged(*one) for one in some], ("input_ids", "attention_mask", "completion_mask")
    return {name: torch.tensor([[text[k] for text in pair] for pair in judgements]) for k, name in enumerate(names)}


weights = [6 if "came late" in prompt else 1 for prompt, _ in known]
pairs = with_reference(tuned, joined(random.choices(known, weights, k=2_000)), batch_size=500)
others = joined([one for one in held_out if "came late" in one[0]])


@torch.no_grad()
def tell(model, when):
    """Print by how much the liked answer to a late parcel is likelier than the other, and what the model writes."""
    chosen, rejected = DPO(model.eval()).log_probabilities(others["input_ids"], others["completion_mask"])
    prompt = next(prompt for prompt, _ in held_out if "came late" in prompt)
    print(f"{when} log-probability {(chosen - rejected).mean():+.1f} beside the other's; {said(model, prompt)!r}")


tell(tuned, "before:")
adapted = with_adapters(tuned)
private = trained(DPO(adapted, beta=0.5), pairs, rate=0.0007, batch_size=50, steps=10)
tell(adapted, "after: ")
assert private.epsilon() <= EPSILON
print(next(sentence for sentence in private.statement().caveats if "pair" in sentence))

# %%
# DPO pushes two answers apart, and the noise moves all others: with so few pairs the liked answer gains, and what the model writes may suffer.
