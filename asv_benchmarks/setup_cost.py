"""What set-up costs in time and memory: two checkouts of dpcore, Opacus and a plain step, each in its own process.

    git worktree add /tmp/before 0424647
    PYTHONPATH=/tmp/opacus python asv_benchmarks/setup_cost.py --before /tmp/before --output setup_cost.json

A plain step is the median of some after the first one. Memory is the process's peak during that part, with model, data
and imports. "again" is a second model of the same kind in the same process, as in a sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from whole_step.models import Case, Recurrent, cases, loss  # noqa: E402

CONTESTANTS = ("plain", "before", "after", "Opacus")


class Logits(nn.Module):
    """A Hugging Face model that returns only the logits."""

    def __init__(self, model: nn.Module, images: bool = False) -> None:
        super().__init__()
        self.model, self.images = model, images

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        if self.images:
            return self.model(pixel_values=inputs).logits
        return self.model(input_ids=inputs, use_cache=False).logits


def gpt2(width: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    """GPT-2 with its tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Logits(GPT2LMHeadModel(config))


def llama() -> nn.Module:
    """A Llama of 12 million parameters with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=8000, max_position_embeddings=128,
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


def vit() -> nn.Module:
    """ViT of 5.5 million parameters for images of 224x224."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=12, num_attention_heads=3, num_labels=10
    )
    return Logits(ViTForImageClassification(config), images=True)


def models() -> dict[str, Case]:
    """Return the models by name."""
    words: dict[str, Any] = {"sequence": True, "update": "adam"}
    known = cases()
    return {
        "MLP": known["mlp"],
        "CNN": known["cnn"],
        "LSTM, T = 200": Case(lambda: Recurrent(8000, 128, 128, 1), 32, (200,), 8000, update="adam"),
        "LSTM, T = 1,000": Case(lambda: Recurrent(8000, 128, 128, 1), 32, (1000,), 8000, update="adam"),
        "ViT": Case(vit, 8, (3, 224, 224), update="adam"),
        "Llama-shaped": Case(llama, 16, (128,), 8000, 8000, **words),
        "GPT-2, 3 million": Case(lambda: gpt2(192, 4, 4, 5000), 16, (128,), 5000, 5000, **words),
        "GPT-2, 10 million": Case(lambda: gpt2(320, 6, 5, 8000), 16, (128,), 8000, 8000, **words),
        "GPT-2, 124 million": Case(lambda: gpt2(768, 12, 12, 50257), 8, (128,), 50257, 50257, **words),
    }


def peak(work: Any) -> tuple[float, int]:
    """Return the seconds of some work, and the process's peak memory meanwhile, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    begin = time.perf_counter()
    work()
    spent = time.perf_counter() - begin
    status = Path("/proc/self/status").read_text()
    held = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return spent, int(held.split()[1]) * 1024


def child(contestant: str, name: str, threads: int) -> dict[str, Any]:
    """Measure one contestant on one model."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    case = models()[name]
    model, data = case.build(), case.data(2, 0)
    if name == "ViT":
        data = data[0] / 4, data[1]
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if contestant == "plain":
        optimizer = (torch.optim.Adam if case.update == "adam" else torch.optim.SGD)(model.parameters(), lr=1e-4)
        inputs, targets = (t[: case.batch_size] for t in data)

        def step() -> None:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()

        steps = [peak(step) for _ in range(6)]
        return found | {"step_s": statistics.median(s for s, _ in steps[1:]), "peak_bytes": max(b for _, b in steps)}
    if contestant == "Opacus":
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator
        from torch.utils.data import DataLoader, TensorDataset

        def set_up() -> None:
            nonlocal model
            model = ModuleValidator.fix(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            loader = DataLoader(TensorDataset(*data), batch_size=case.batch_size)
            ready = PrivacyEngine().make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
            )

            def step() -> None:
                ready[1].zero_grad()
                F.cross_entropy(
                    ready[0](data[0][: case.batch_size]).flatten(0, -2), data[1][: case.batch_size].flatten()
                ).backward()
                ready[1].step()

            run.append(step)

        run: list[Any] = []
        spent, held = peak(set_up)
        found |= {"setup_s": spent, "setup_peak_bytes": held}
        spent, held = peak(run[0])
        return found | {"first_step_s": spent, "first_step_peak_bytes": held}
    import dpcore
    from dpcore.sampling import FixedOrderSampler
    from dpcore.torch import make_private

    def private(model: nn.Module) -> Any:
        method = dpcore.methods.dp_sgd(
            lr=1e-4, base=case.update, noise_multiplier=1.0, batch_size=case.batch_size, max_grad_norm=1.0
        )
        sampler = FixedOrderSampler(dataset_size=len(data[0]), batch_size=case.batch_size, shuffle=False)
        return make_private(model, data, method, steps=10**4, sampling=sampler, loss=loss)

    runs: list[Any] = []
    spent, held = peak(lambda: runs.append(private(model)))
    found |= {"setup_s": spent, "setup_peak_bytes": held}
    batch = next(iter(runs[0].loader))
    spent, held = peak(lambda: runs[0].step(batch))
    found |= {"first_step_s": spent, "first_step_peak_bytes": held, "way": runs[0]._engine.gradient.way}
    del runs[:]
    other = case.build()
    return found | {"again_s": peak(lambda: runs.append(private(other)))[0]}


def main() -> None:
    """Measure and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--models", default=";".join(models()))
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=400, help="seconds after which a contestant is given up")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs=2)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(*given.child, given.threads)))
        return
    roots = {"before": given.before.resolve(), "after": HERE.parent}
    found: dict[str, dict[str, Any]] = {}
    for name in given.models.split(";"):
        found[name] = {}
        for contestant in given.contestants.split(","):
            root = roots.get(contestant)
            paths = [] if root is None else [str(root), str(root / "backends")]
            environment = {**os.environ, "PYTHONPATH": ":".join([*paths, os.environ.get("PYTHONPATH", "")])}
            command = [sys.executable, "-P", "-W", "ignore", __file__, "--before", str(given.before)]
            command += ["--threads", str(given.threads), "--child", contestant, name]
            try:
                done = subprocess.run(
                    command, env=environment, cwd="/", capture_output=True, text=True, timeout=given.limit, check=False
                )
                failure = (done.stderr.strip().splitlines() or [""])[-1][:300]
                found[name][contestant] = json.loads(done.stdout) if done.returncode == 0 else {"failed": failure}
            except subprocess.TimeoutExpired:
                found[name][contestant] = {"failed": f"not done after {given.limit} s"}
        plain = found[name].get("plain", {})
        for own in found[name].values():
            if "setup_s" in own and "step_s" in plain:
                own["setup_in_plain_steps"] = round(own["setup_s"] / plain["step_s"], 2)
                own["setup_memory_ratio"] = round(own["setup_peak_bytes"] / plain["peak_bytes"], 3)
        print(name, json.dumps(found[name]), flush=True)
        if given.output:
            about = {
                "command": " ".join(sys.argv), "threads": given.threads, "torch": torch.__version__,
                "python": platform.python_version(), "machine": platform.machine(), "load": os.getloadavg(),
            }  # fmt: skip
            given.output.write_text(json.dumps({"about": about, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
