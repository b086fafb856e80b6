"""Private over plain steps on GPUs, predicted: peaks of data sheets, bytes and products counted, loops as compiled.

    python asv_benchmarks/predicted.py              from asv_benchmarks/recorded/static.json

Nothing was run on a GPU. Counted are the linear layers of a model in bfloat16, without attention's own products, head
and embedding. Plain is three products a layer, at 0.65 of the peak; what goes through memory is the operands of each
in 16 bits, and 28 bytes a parameter for the update. Private has two of these products; a norm and a sum by our
kernels, or rows where the engine keeps them (`dpcore.torch.gradients.sources`): a third product, and B p q numbers
written once and read twice, by kernels that take as long as memory, their instructions or their float64; 40 bytes a
parameter, 16 of them for the sum. A kernel of ours on pairs takes as long as the longest of

- its products, at 0.65 of the peak, too;
- the instructions that a scheduler starts for them, one each cycle; what stands outside of the loop counts once an
  example;
- the operands of its tiles, through the second-level cache at 0.85 of 5120 bytes a cycle (an A100's white paper;
  assumed of an H200), or 16 bytes a cycle and multiprocessor (assumed of an L4 and a 4090);
- instructions and products, one after the other, divided by the programs that have room in the registers: a program
  waits for its products.

An MLP has one position: norms take as long as memory, their instructions or their float64; sums are four products of
bytes, at twice the rate; and their factors, read in 16 bits, written and read in two bytes, as long as memory or the
instructions that make them. Launches are not counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().parent / "recorded" / "static.json"
#: Peaks as in `dpcore_triton.chips` (1e12 a second), the compiler's target; of a multiprocessor, products a cycle and
#: bytes a cycle of the second-level cache; float64 operations outside of tensor cores (1e12 a second).
CHIPS = {
    "H200": (989, 4.8, 90, 2048, 5120 / 132, 16.8),
    "A100": (312, 2.0, 80, 1024, 5120 / 108, 4.85),
    "L4": (121, 0.3, 89, 512, 16, 0.245),
    "4090": (165, 1.01, 89, 256, 16, 0.645),
}
#: Rows and columns of a tile, positions, columns or examples of a loop, and warps, as in `dpcore_triton.core_linear`.
TILES = {
    "tiles": (128, 128, 64, 8),
    "inner products": (64, 64, 64, 8),
    "sums": (64, 128, 64, 8),
    "sums in one chain": (64, 128, 64, 8),
    "sums in one chain, wide": (128, 128, 64, 8),
    "sums of bytes": (64, 64, 64, 4),
    "sums of bytes, wide": (128, 64, 64, 8),
}
#: Positions, examples, layers of a block (p, q): all blocks of a model are alike.
MODELS: dict[str, Any] = {
    "GPT-2 small, T=1024, B=8": (1024, 8, [(768, 2304), (768, 768), (768, 3072), (3072, 768)]),
    "BERT-base, T=128, B=32": (128, 32, [(768, 768)] * 4 + [(768, 3072), (3072, 768)]),
    "ViT-S, T=197, B=64": (197, 64, [(384, 1152), (384, 384), (384, 1536), (1536, 384)]),
    "MLP of 2048 x 2048, B=512": (1, 512, [(2048, 2048)]),
    "MLP of 2048 x 2048, B=4096": (1, 4096, [(2048, 2048)]),
}
PLAIN, MEMORY = 0.65, 0.85
#: Threads that a multiprocessor starts an instruction of in a cycle; numbers of a thread in the loop that sums rows, in
#: that of the norms of one position, and in those that make factors; and columns of the latter.
LANES, SUMMED, SQUARED, FACTORED, FACTORED_COLUMNS = 128, 8, 64, 16, 256
#: Positions up to which a sum is one chain, and inner products are taken.
FEW = 256
REGISTERS = 65536


def ratio(model: str, chip: str, figures: dict[str, dict[str, float]]) -> float:
    """Return the time of a private step over that of a plain one."""
    (times, examples, layers), (peak, bandwidth, target, per_cycle, cache, wide_peak) = MODELS[model], CHIPS[chip]

    def slowed(kernel: str, length: int, factors: int = 1) -> float:
        """Return a kernel's time, by loops that are `length` positions or columns together, over that at the peak.

        `factors` are the products that a pair of numbers takes.
        """
        title = "sliced sums" if kernel == "sums of bytes" else f"core {kernel}, bf16"
        found = figures[f"{title}, sm_{target}"]
        high, wide, depth, warps = TILES[f"{kernel}, wide" if f"{kernel}, wide" in TILES and target == 90 else kernel]
        loop, products = found["instructions of the loop"], factors * high * wide * depth / per_cycle
        outside = found["around it"] if kernel in ("sums", "sums in one chain") else found["instructions"] - loop
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
        private += 2 * (product / PLAIN + operands) + 40 * p * q / bandwidth / MEMORY
        cycles = peak / (2 * per_cycle)
        if times >= 24 and p * q <= 1.75 * times * (p + q) and not prefers_pairs(chip, times):
            passed = 2 / bandwidth / MEMORY
            squares, loop = (
                figures[f"{title}, bfloat16, sm_{target}"] for title in ("row_norms: squares", "weighted_sum")
            )
            squared = squares["all instructions an element"] / LANES / cycles
            squared = max(squared, 2 * squares["double instructions an element"] / wide_peak)
            summed = loop["instructions of the loop"] / SUMMED / LANES / cycles
            read = max(passed, squared) + max(passed, summed)
            private += product / PLAIN + operands + examples * p * q * (passed + read)
            continue
        if times == 1:
            # Four products of bytes, twice as many in a cycle; a number's two bytes are those of the tiles' operands.
            sums = 2 * product * slowed("sums of bytes", examples, 2)
            titles = "pairs: lengths, bfloat16", "sliced factors, bf16"
            loop, factors = (figures[f"{title}, sm_{target}"] for title in titles)
            issued = loop["instructions of the loop"] / SQUARED / LANES / cycles
            squared = max(issued, 2 * loop["float64 of the loop"] / SQUARED / wide_peak)
            loops, rows = factors["instructions of loops that read"], (p + q) / 2 / FACTORED_COLUMNS
            made = (loops + (factors["instructions"] - loops) / rows) / 2 / FACTORED / LANES / cycles
            private += sums + operands + max(operands, examples * (p + q) * squared)
            private += max(2 * operands, examples * (p + q) * made)
            continue
        long = filled(64)
        grams = examples * long * (long + 64) * (p + q) / peak * slowed("inner products", p + q)
        tiles = product * long / times * slowed("tiles", long)
        norm = min(grams, tiles) if times <= FEW else tiles
        sums = slowed("sums in one chain" if times <= FEW else "sums", long)
        private += operands + norm + product * long / times * sums
    return round(private / plain, 3)


def prefers_pairs(chip: str, times: int) -> bool:
    """Return `dpcore_triton.linear.prefers_pairs` of a layer that fills its tiles."""
    peak, bandwidth, target, *_ = CHIPS[chip]
    norms_and_sums, passes = (5.0, 3.6) if target == 90 else (3.6, 3.0)
    rows = 2 * times / peak / PLAIN + 2 * passes / bandwidth / MEMORY
    return times <= FEW and 2 * times / peak * norms_and_sums < 0.9 * rows


def ratios(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the ratio of each model and chip, as figures."""
    return {f"step of {m}, {c}": {"private / plain": ratio(m, c, figures)} for m in MODELS for c in CHIPS}


if __name__ == "__main__":
    for name, found in ratios(json.loads(RECORDED.read_text())).items():
        print(f"{name}: {found['private / plain']:.2f}")
