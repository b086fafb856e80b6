"""Private over plain steps on GPUs, predicted: peaks of data sheets, bytes and products counted, loops as compiled.

    python asv_benchmarks/predicted.py              from asv_benchmarks/recorded/static.json

Nothing was run on a GPU. Counted are the linear layers of a model in bfloat16, without attention's own products, head
and embedding. Plain is three products a layer, at 0.65 of the peak; what goes through memory is the operands of each
in 16 bits, and 28 bytes a parameter for the update. Private has two of these products; a norm and a sum by our
kernels, or rows where the engine keeps them (`dpcore.torch.gradients.sources`): a third product, and B p q numbers
written once and read twice; 56 bytes a parameter. A kernel of ours takes as long as its tensor cores, or as the
instructions that a scheduler starts for them, one each cycle; what stands outside of the loop counts once an example.
An MLP has one position: norms are three float64 operations a number, sums four products of bytes, at twice the rate,
with factors that are written once and read once. Launches are not counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().parent / "recorded" / "static.json"
#: Peaks as in `dpcore_triton.chips` (1e12 a second), the compiler's target, products a cycle and multiprocessor, and
#: float64 operations outside of tensor cores (1e12 a second).
CHIPS = {
    "H200": (989, 4.8, 90, 2048, 16.8),
    "A100": (312, 2.0, 80, 1024, 4.85),
    "L4": (121, 0.3, 89, 512, 0.245),
    "4090": (165, 1.01, 89, 256, 0.645),
}
#: Positions, examples, layers of a block (p, q): all blocks of a model are alike.
MODELS: dict[str, Any] = {
    "GPT-2 small, T=1024, B=8": (1024, 8, [(768, 2304), (768, 768), (768, 3072), (3072, 768)]),
    "BERT-base, T=128, B=32": (128, 32, [(768, 768)] * 4 + [(768, 3072), (3072, 768)]),
    "ViT-S, T=197, B=64": (197, 64, [(384, 1152), (384, 384), (384, 1536), (1536, 384)]),
    "MLP of 2048 x 2048, B=512": (1, 512, [(2048, 2048)]),
    "MLP of 2048 x 2048, B=4096": (1, 4096, [(2048, 2048)]),
}
PLAIN, MEMORY, SIDE, DEPTH = 0.65, 0.85, 64, 32


def ratio(model: str, chip: str, figures: dict[str, dict[str, float]]) -> float:
    """Return the time of a private step over that of a plain one."""
    (times, examples, layers), (peak, bandwidth, target, per_cycle, wide) = MODELS[model], CHIPS[chip]

    def slowed(kernel: str, loops: float, products: int = SIDE * SIDE * DEPTH) -> float:
        """Return a kernel's time, by loops of so many products, over that of its products at the peak."""
        found = figures[f"{kernel}, sm_{target}"]
        loop = found["instructions of the loop"]
        return max(1.0, (loop + (found["instructions"] - loop) / loops) * per_cycle / products)

    plain = private = 0.0
    for p, q in layers:
        product = 2 * examples * times * p * q / peak  # 1e-12 s, as all that follow
        operands = 2 * examples * times * (p + q) / bandwidth / MEMORY
        plain += 3 * (product / PLAIN + operands) + 28 * p * q / bandwidth / MEMORY
        private += 2 * (product / PLAIN + operands) + 56 * p * q / bandwidth / MEMORY
        if times >= 24 and p * q <= 1.75 * times * (p + q):
            private += product / PLAIN + operands + 3 * 2 * examples * p * q / bandwidth / MEMORY
            continue
        if times == 1:
            # Twice as many products of bytes in a cycle, and four times 64 x 64 x 64 of them in a loop.
            sums = 4 * product / 2 * slowed("sliced sums", examples / 64, 2 * SIDE * SIDE * 64)
            private += sums + 3 * examples * (p + q) / wide + 4 * operands
            continue
        filled = -(-times // SIDE) * SIDE
        grams = (
            examples * filled * (filled + SIDE) * (p + q) / peak * slowed("core inner products, bf16", (p + q) / DEPTH)
        )
        tiles = product * filled / times * slowed("core tiles, bf16", filled / DEPTH)
        norm = min(grams, tiles) if times <= 256 else tiles
        private += operands + norm + product * filled / times * slowed("core sums, bf16", filled / DEPTH)
    return round(private / plain, 3)


def ratios(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the ratio of each model and chip, as figures."""
    return {f"step of {m}, {c}": {"private / plain": ratio(m, c, figures)} for m in MODELS for c in CHIPS}


if __name__ == "__main__":
    for name, found in ratios(json.loads(RECORDED.read_text())).items():
        print(f"{name}: {found['private / plain']:.2f}")
