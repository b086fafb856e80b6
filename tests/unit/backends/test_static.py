"""What is recorded of compiled kernels shows tensor cores and no spills, and a slowdown is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asv_benchmarks import predicted, static
from tests.depth import chosen

RECORDED: static.Figures = json.loads(static.RECORDED.read_text())

# A float64 product, and loads of four numbers whose addresses the compiler no longer knows to be multiples of 16.
PLANTED = """
import json
from asv_benchmarks import static
from tests.unit.backends import test_compile as compiled

compiled.without_a_gpu()
from dpcore_triton import core_linear, linear

cases = {case[0]: case for case in compiled.core_cases(80)}
title, kernel, types, constants, elements = cases["core tiles, bf16"]
product = title, linear._tiles_kernel, types, {"SCALED": False, "SIDE": 32, "DEPTH": 16}, 32**2
title, kernel, types, constants, elements = cases["core lengths, fp32"]
loads = title, kernel, types, {**constants, "ALIGNED": False}, elements
found = {f"{case[0]}, sm_80": static.figures(compiled.compile_and_measure(*case, 80)) for case in (product, loads)}
print(json.dumps(found))
"""


def test_no_kernel_spills_and_products_take_few_instructions() -> None:
    """As recorded; `test_the_compiler_makes_what_is_recorded` compares that with the compiler."""
    cores = {name: found for name, found in RECORDED.items() if name.startswith("core")}
    assert len(cores) == (4 * 2 + 1) * 3 + 1  # the last: a variant, for one chip
    for name, found in cores.items():
        assert found["spills"] == 0, name
        products = "lengths" not in name
        assert (found["16-bit products of the loop"] > 0) == products, name
        assert found["float64 products of the loop"] == 0, name
        assert found["double instructions an element"] < 1, name
        # A warp's share of a tile takes 16, 32 or 64 HMMA, or 4 HGMMA; of 64 x 64 x 16 float32 numbers 24, or 3.
        most = 352 if "fp32" in name else 264 if "tiles" in name else 184
        assert 0 < found["instructions of the loop"] <= most or not products, name


def test_sums_of_bytes_are_tensor_core_instructions_and_little_else() -> None:
    sliced = {name: found for name, found in RECORDED.items() if name.startswith("sliced")}
    assert len(sliced) == 3 * 3 + 1
    for name, found in sliced.items():
        assert found["spills"] == 0, name
        if "sums" in name:  # four products of 64 x 64 x 64: 64 IMMA, or 8 IGMMA, for four warps
            assert found["8-bit products of the loop"] == (8 if name.endswith("sm_90") else 64), name
            assert found["instructions of the loop"] <= 150, name


def test_a_figure_that_is_worse_is_named_with_its_kernel() -> None:
    now = {name: dict(found) for name, found in RECORDED.items()}
    assert static.worse(now, RECORDED) == []
    now["core sums, bf16, sm_90"]["registers"] *= 1.04
    assert static.worse(now, RECORDED) == []
    now["core sums, bf16, sm_90"]["registers"] *= 1.04
    now["core tiles, fp32, sm_80"]["spills"] = 1.0
    del now["step sgd, sm_90"]
    found = static.worse(now, RECORDED)
    assert [line.split(":")[0] for line in found] == [
        "core sums, bf16, sm_90", "core tiles, fp32, sm_80", "step sgd, sm_90",
    ]  # fmt: skip
    assert "registers" in found[0]
    assert "spills 1, was 0" in found[1]


def test_predicted_steps_are_those_of_the_recorded_loops() -> None:
    found = predicted.ratios(RECORDED)
    assert found == {name: each for name, each in RECORDED.items() if name.startswith("step of")}
    slower = dict(RECORDED)
    kernel = "core sums in one chain, bf16, sm_90"
    slower[kernel] = {**RECORDED[kernel], "instructions of the loop": 300.0}
    lines = static.worse(RECORDED | predicted.ratios(slower), RECORDED)
    models = ("BERT-base, T=128, B=32", "ViT-S, T=197, B=64")
    assert [line.split(":")[0] for line in lines] == [f"step of {model}, H200" for model in models]


def test_predicted_tiles_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from dpcore_triton import core_linear, cores, linear, slices

    def sums(**chosen: bool) -> core_linear.Tile:
        return core_linear.tile_of_sums(split=False, **chosen)

    side, depth = cores.SIDE, int(cores.CORE_DEPTH.value)
    assert {
        "tiles": core_linear.tile_of_norms(split=False),
        "inner products": (side, side, depth, core_linear.warps_of_gram(split=False)),
        "sums": sums(chained=False, wide=True),
        "sums in one chain": sums(chained=True, wide=False),
        "sums in one chain, wide": sums(chained=True, wide=True),
        "sums of bytes": slices.SUMS,
        "sums of bytes, wide": slices.WIDE_SUMS,
    } == predicted.TILES
    assert {slices.SUMS.depth, slices.WIDE_SUMS.depth} == {int(slices.DEPTH.value)}
    assert predicted.FEW == cores.CHAIN == linear.GRAM_POSITIONS
    compiled = json.loads(static.RECORDED.with_name("compiled.json").read_text())
    assert compiled["pairs: lengths, bfloat16, sm_90"]["elements_a_thread"] == predicted.SQUARED
    assert compiled["sliced factors, bf16, sm_90"]["elements_a_thread"] == predicted.FACTORED


def run(*command: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": f"{static.ROOT}:{static.ROOT / 'backends'}"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_planted_slowdowns_fail_by_name(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    planted = json.loads(run("-c", PLANTED, folder=tmp_path))
    found = static.worse(RECORDED | planted, RECORDED)
    products = [line for line in found if line.startswith("core tiles, bf16, sm_80: ")]
    loads = [line for line in found if line.startswith("core lengths, fp32, sm_80: ")]
    assert sorted(products + loads) == found
    assert any("float64 products" in line for line in products)
    now, before = (figures["core lengths, fp32, sm_80"]["loads and stores"] for figures in (planted, RECORDED))
    assert f"core lengths, fp32, sm_80: loads and stores {now:g}, was {before:g}" in loads
    assert now >= 2 * before


COMPILED_AGAIN = """
import json, sys
import triton
from asv_benchmarks import static
from tests.unit.backends import test_compile as compiled

compiled.without_a_gpu()
from dpcore_triton import update

made = []
compiled.compile_and_measure = lambda title, *more: made.append(f"{title}, sm_{more[-1]}") or {}
static.figures, ours = (lambda record: {}), "update adam, sm_"

def again(change):
    made.clear()
    undo = change()
    static.measured(ours, fresh=False)
    undo()
    return list(made)

def cases(first=compiled.cases):
    compiled.cases = lambda: [(*case[:2], {**case[2], "derived": "*fp64"}, *case[3:]) for case in first()]
    return lambda: setattr(compiled, "cases", first)

def version(first=triton.__version__):
    triton.__version__ = "0"
    return lambda: setattr(triton, "__version__", first)

def called(first=update.scalars):  # by a function that the kernel calls
    update.scalars = update.loaded
    return lambda: setattr(update, "scalars", first)

def constant(first=update.UPDATE_NUMBERS):
    update.UPDATE_NUMBERS = type(first)(first.value + 1)
    return lambda: setattr(update, "UPDATE_NUMBERS", first)

_, records = static.measured(ours)
compiled.RECORDED = static.Path(sys.argv[1])
compiled.RECORDED.write_text(json.dumps(records))
print(json.dumps(list(map(again, [lambda: (lambda: None), cases, version, called, constant]))))
"""


def test_what_is_as_it_was_recorded_is_not_compiled_and_all_else_is(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    same, *others = json.loads(run("-c", COMPILED_AGAIN, str(tmp_path / "digests"), folder=tmp_path))
    assert same == []
    assert others == [[f"update adam, sm_{chip}" for chip in static.CHIPS]] * 4


@pytest.mark.parametrize("chip", static.CHIPS)
def test_bytes_are_those_of_the_arrays(chip: int) -> None:
    """A thread has eight elements of these rows, and four of the update: seven arrays, besides its settings."""
    moved = {name: found.get("bytes of loads and stores", 0.0) for name, found in RECORDED.items()}
    assert moved[f"weighted_sum, sm_{chip}"] - moved[f"weighted_sum, bfloat16, sm_{chip}"] == 8 * 2
    assert 4 * 7 * 4 < moved[f"update adam, sm_{chip}"] < 4 * 7 * 4 + 100


def test_all_kernels_are_tracked_but_variants() -> None:
    titles = ["weighted_sum", "weighted_sum, bfloat16", "weighted_sum, bfloat16, scale", "tokens, scale", "step x"]
    found = [title for title, _ in static.wanted([*titles, *static.STEPS])]
    assert list(dict.fromkeys(found)) == [*titles[:-1], *static.STEPS]
    assert found.count("tokens, scale") == len(static.CHIPS)
    assert found.count("weighted_sum, bfloat16, scale") == 1


@pytest.mark.slow
@pytest.mark.skipif(not chosen(False, True), reason="`make bench-check` does it; two minutes")
def test_the_compiler_makes_what_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = str(static.ROOT / "asv_benchmarks" / "static.py")
    assert "no figure is more than 5 % worse" in run(script, "--all", folder=tmp_path)
