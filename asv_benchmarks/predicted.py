"""Private over plain steps on GPUs, predicted: peaks of data sheets, bytes and products counted, loops as compiled.

    python asv_benchmarks/predicted.py              from asv_benchmarks/recorded/static.json

Nothing was run on a GPU. Counted are the linear layers of a model in bfloat16, without attention's own products, head
and embedding. Plain is three products a layer, at 0.65 of the peak; what goes through memory is the operands of each
in 16 bits, and 28 bytes a parameter for the update. Private has two of these products; a norm and a sum by our
kernels, or rows where the engine keeps them (`dpcore.torch.gradients.sources`): a third product, and B p q numbers
written once and read twice; 56 bytes a parameter. A kernel of ours takes as long as the longest of

- its products, at 0.65 of the peak, too;
- the instructions that a scheduler starts for them, one each cycle; what stands outside of the loop counts once an
  example;
- the operands of its tiles, through the second-level cache at 0.85 of 5120 bytes a cycle (an A100's white paper;
  assumed of an H200), or 16 bytes a cycle and multiprocessor (assumed of an L4 and a 4090);
- instructions and products, one after the other, divided by the programs that have room in the registers: a program
  waits for its products.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().parent / "recorded" / "static.json"
#: Peaks as in `dpcore_triton.chips` (1e12 a second), the compiler's target; of a multiprocessor, products a cycle and
#: bytes a cycle of the second-level cache.
CHIPS = {
    "H200": (989, 4.8, 90, 2048, 5120 / 132),
    "A100": (312, 2.0, 80, 1024, 5120 / 108),
    "L4": (121, 0.3, 89, 512, 16),
    "4090": (165, 1.01, 89, 256, 16),
}
#: Rows and columns of a tile, positions or columns of a loop, and warps, as in `dpcore_triton.core_linear`.
TILES = {
    "tiles": (128, 128, 64, 8),
    "inner products": (64, 64, 64, 8),
    "sums": (64, 128, 64, 8),
    "sums in one chain": (64, 128, 64, 8),
    "sums in one chain, wide": (128, 128, 64, 8),
}
#: Positions, examples, layers of a block (p, q): all blocks of a model are alike.
MODELS: dict[str, Any] = {
    "GPT-2 small, T=1024, B=8": (1024, 8, [(768, 2304), (768, 768), (768, 3072), (3072, 768)]),
    "BERT-base, T=128, B=32": (128, 32, [(768, 768)] * 4 + [(768, 3072), (3072, 768)]),
    "ViT-S, T=197, B=64": (197, 64, [(384, 1152), (384, 384), (384, 1536), (1536, 384)]),
}
PLAIN, MEMORY = 0.65, 0.85
#: Positions up to which a sum is one chain, and inner products are taken.
FEW = 256
REGISTERS = 65536


def ratio(model: str, chip: str, figures: dict[str, dict[str, float]]) -> float:
    """Return the time of a private step over that of a plain one."""
    (times, examples, layers), (peak, bandwidth, target, per_cycle, cache) = MODELS[model], CHIPS[chip]

    def slowed(kernel: str, length: int) -> float:
        """Return a kernel's time, by loops that are `length` positions or columns together, over that at the peak."""
        found = figures[f"core {kernel}, bf16, sm_{target}"]
        high, wide, depth, warps = TILES[f"{kernel}, wide" if f"{kernel}, wide" in TILES and target == 90 else kernel]
        loop, products = found["instructions of the loop"], high * wide * depth / per_cycle
        outside = found["around it"] if "sums" in kernel else found["instructions"] - loop
        issued = (loop + outside * depth / length) * warps / 4
        loaded = 2 * (high + wide) * depth / cache / MEMORY
        programs = REGISTERS // (-(-found["registers"] // 8) * 8 * 32 * warps)
        return max(products / PLAIN, issued, loaded, (products + issued) / programs) / products

    def filled(depth: int) -> int:
        return -(-times // depth) * depth

    plain = private = 0.0
    for p, q in layers:
        product = 2 * examples * times * p * q / peak  # 1e-12 s, as all that follow
        operands = 2 * examples * times * (p + q) / bandwidth / MEMORY
        plain += 3 * (product / PLAIN + operands) + 28 * p * q / bandwidth / MEMORY
        private += 2 * (product / PLAIN + operands) + 56 * p * q / bandwidth / MEMORY
        if times >= 24 and p * q <= 1.75 * times * (p + q):
            private += product / PLAIN + operands + 3 * 2 * examples * p * q / bandwidth / MEMORY
            continue
        long = filled(64)
        grams = examples * long * (long + 64) * (p + q) / peak * slowed("inner products", p + q)
        tiles = product * long / times * slowed("tiles", long)
        norm = min(grams, tiles) if times <= FEW else tiles
        sums = slowed("sums in one chain" if times <= FEW else "sums", long)
        private += operands + norm + product * long / times * sums
    return round(private / plain, 3)


def ratios(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the ratio of each model and chip, as figures."""
    return {f"step of {m}, {c}": {"private / plain": ratio(m, c, figures)} for m in MODELS for c in CHIPS}


if __name__ == "__main__":
    for name, found in ratios(json.loads(RECORDED.read_text())).items():
        print(f"{name}: {found['private / plain']:.2f}")
