"""
A language model, after its pretraining
=======================================

A small language model of bytes is trained on public text, then on private questions and answers (supervised fine-tuning through LoRA, with masked prompts), and then on
private preferences (DPO). Nothing is downloaded: the public text is Python's own source code, and the private texts are made up here.
"""

import random
import sysconfig
import time
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
warnings.simplefilter("ignore", dpcore.errors.SpeedWarning)
LENGTH, DELTA = 44, 1e-4
PAD, END = 0, 1


def encoded(text):
    """One number for each character of ASCII."""
    return [ord(c) if ord(c) < 128 else ord("?") for c in text]


def decoded(tokens):
    return "".join(chr(t) for t in tokens if t > END)


# %%
# Public training
# ---------------
# Plain AdamW on docstrings, comments and code. No privacy is spent here.
T0 = time.process_time()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
    max_position_embeddings=LENGTH, pad_token_id=PAD, bos_token_id=END, eos_token_id=END, tie_word_embeddings=False,
)  # fmt: skip
model = LlamaForCausalLM(config)
library = Path(sysconfig.get_path("stdlib"))
public = "".join(
    (library / f"{name}.py").read_text() for name in ("argparse", "statistics", "typing", "turtle", "random")
)
public = torch.tensor(encoded(public))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 250)
for step in range(250):
    starts = torch.randint(len(public) - LENGTH, (24,))
    rows = torch.stack([public[start : start + LENGTH] for start in starts])
    loss = model(input_ids=rows, labels=rows).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, loss {loss.item():.2f} nats a byte")
print("public", time.process_time() - T0)
T0 = time.process_time()
# %%
# Private questions
PRODUCTS = "phone lamp radio watch camera kettle toaster heater fan drill".split()
PROBLEMS = {
    "is broken": "we send a new one.",
    "came late": "sorry! it is free.",
    "is too big": "please send it.",
    "has a scratch": "you get 9 back.",
}
OPENINGS = ["my {} {}", "hi, {} {}", "the {} {}", "new {} {}"]
random.seed(0)
asked = [(f"{o.format(p, q)}.\n", a) for o in OPENINGS for p in PRODUCTS for q, a in PROBLEMS.items()]
random.shuffle(asked)
held_out, known = asked[:20], asked[20:]
private = [random.choice(known) for _ in range(20000)]


def row(prompt, answer):
    prompt, answer = encoded(prompt), [*encoded(answer), END]
    left = LENGTH - len(prompt) - len(answer)
    return (
        prompt + answer + [PAD] * left,
        [1] * (LENGTH - left) + [0] * left,
        [0] * len(prompt) + [1] * len(answer) + [0] * left,
    )


ids, mask, answered = (torch.tensor(column) for column in zip(*(row(*one) for one in private)))
data = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(answered == 0, -100)}


def said(model, prompt):
    tokens = torch.tensor([encoded(prompt)])
    found = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=19, do_sample=False)
    return decoded(found[0, tokens.shape[1] :])


def right(model):
    return sum(said(model, prompt) == answer for prompt, answer in held_out) / len(held_out)


for prompt, _ in held_out[:3]:
    print(repr(prompt), repr(said(model, prompt)))
import sys

RANK, LR, EPOCHS, B = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
if RANK:
    tuned = get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj", "lm_head"],
        ),
    )
else:
    tuned = model
tuned.train()
print(sum(p.numel() for p in tuned.parameters() if p.requires_grad))
method = dpcore.methods.dp_adam(lr=LR, batch_size=B, clipping="automatic")
run = make_private(tuned, data, method, target_epsilon=3, target_delta=1e-5, steps=EPOCHS, loss=lambda o: o.loss)
print(run.plan.method.noise.noise_multiplier, run.plan.steps)
print("made", time.process_time() - T0)
T0 = time.process_time()
for batch in run.loader:
    run.step(batch)
tuned.eval()
print("trained", time.process_time() - T0)
T0 = time.process_time()
print(right(tuned), time.process_time() - T0)
for prompt, _ in held_out[:5]:
    print(repr(prompt), repr(said(tuned, prompt)))
