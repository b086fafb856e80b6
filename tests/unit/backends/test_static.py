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

PLANTED = """
import json
from asv_benchmarks import static
from tests.unit.backends import test_compile as compiled

compiled.without_a_gpu()
from dpcore_triton import core_linear, cores, linear

title, kernel, types, constants, elements = compiled.core_cases(80)[0]
constants = {"SCALED": False, "SIDE": 32, "DEPTH": 16}
record = compiled.compile_and_measure(title, linear._tiles_kernel, types, constants, 32**2, 80)
print(json.dumps({f"{title}, sm_80": static.figures(record)}))
"""


def test_no_kernel_spills_and_products_take_few_instructions() -> None:
    """As recorded; `test_the_compiler_makes_what_is_recorded` compares that with the compiler."""
    cores = {name: found for name, found in RECORDED.items() if name.startswith("core")}
    assert len(cores) == (4 * 2 + 1) * 3
    for name, found in cores.items():
        assert found["spills"] == 0, name
        products = "lengths" not in name
        assert (found["16-bit products of the loop"] > 0) == products, name
        assert found["float64 products of the loop"] == 0, name
        assert found["double instructions an element"] < 1, name
        # A warp's share of a tile takes 16, 32 or 64 HMMA, or 4 HGMMA; of 64 x 64 x 16 float32 numbers 24, or 3.
        most = 352 if "fp32" in name else 264 if "tiles" in name else 184
        assert (0 < found["instructions of the loop"] <= most) == products, name


def test_a_figure_that_is_worse_is_named_with_its_kernel() -> None:
    now = {name: dict(found) for name, found in RECORDED.items()}
    assert static.worse(now, RECORDED) == []
    now["core sums, bf16, sm_90"]["registers"] *= 1.04
    assert static.worse(now, RECORDED) == []
    now["core sums, bf16, sm_90"]["registers"] *= 1.04
    now["core tiles, fp32, sm_80"]["spills"] = 1.0
    del now["step adam, sm_90"]
    found = static.worse(now, RECORDED)
    assert [line.split(":")[0] for line in found] == [
        "core sums, bf16, sm_90", "core tiles, fp32, sm_80", "step adam, sm_90",
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
    assert [line.split(":")[0] for line in lines] == ["step of BERT-base, T=128, B=32, H200"]


def test_predicted_tiles_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from dpcore_triton import core_linear, cores, linear

    def sums(**chosen: bool) -> core_linear.Tile:
        return core_linear.tile_of_sums(split=False, **chosen)

    side, depth = cores.SIDE, int(cores.CORE_DEPTH.value)
    assert {
        "tiles": core_linear.tile_of_norms(split=False),
        "inner products": (side, side, depth, core_linear.warps_of_gram(split=False)),
        "sums": sums(chained=False, wide=True),
        "sums in one chain": sums(chained=True, wide=False),
        "sums in one chain, wide": sums(chained=True, wide=True),
    } == predicted.TILES
    assert predicted.FEW == cores.CHAIN == linear.GRAM_POSITIONS


def run(*command: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": f"{static.ROOT}:{static.ROOT / 'backends'}"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_planted_float64_product_fails_by_name(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    planted = json.loads(run("-c", PLANTED, folder=tmp_path))
    found = static.worse(RECORDED | planted, RECORDED)
    assert found
    assert all(line.startswith("core tiles, bf16, sm_80: ") for line in found)
    assert any("float64 products" in line for line in found)


@pytest.mark.slow
@pytest.mark.skipif(not chosen(False, True), reason="`make bench-check` does it; two minutes")
def test_the_compiler_makes_what_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert "no figure is more than 5 % worse" in run(str(static.ROOT / "asv_benchmarks" / "static.py"), folder=tmp_path)
