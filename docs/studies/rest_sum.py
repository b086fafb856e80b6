"""The sum of all that the sampler's rejection accepts, over every place of every strip, against what it should be.

    python docs/studies/rest_sum.py [STRIPS]

prints a line for each strip and the relative error so far, with a bound on what the remaining strips can change. 2^30
places of a strip take a second or two; a C compiler is needed. See `dpcore.spec.rounded_normal`.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import mpmath

from dpcore.spec import rounded_normal as law

# The operations of `rounded_normal.rest` in its order, none of them fused. Sums keep what each addition rounds.
PROGRAM = """
#include <stdint.h>
#include <stdio.h>
#define LANES 16
int main(void) {
  int strip, bits;
  double left, box, step;
  while (scanf("%d %d %la %la %la", &strip, &bits, &left, &box, &step) == 5) {
    double sum[LANES] = {0}, lost[LANES] = {0}, least[LANES], most[LANES], width = 1;
    for (int l = 0; l < LANES; l++) { least[l] = 1e300; most[l] = -1e300; }
    for (int k = 0; k < bits + 6; k++) width /= 2;
    for (int64_t stair = 0; stair < 512; stair++) {
      double below = box + step * (511.5 - (double)stair);
      for (int64_t first = stair << (bits - 9); first < (stair + 1) << (bits - 9); first += LANES)
        for (int l = 0; l < LANES; l++) {
          double delta = ((double)first + l + 0.5) * width, e = delta * (strip * 0.015625 + 0.5 * delta);
          double s = SERIES, r = left * s - below, t = sum[l] + r;
          lost[l] += r - (t - sum[l]);
          sum[l] = t;
          least[l] = r < least[l] ? r : least[l];
          most[l] = r > most[l] ? r : most[l];
        }
    }
    for (int l = 1; l < LANES; l++) {
      least[0] = least[l] < least[0] ? least[l] : least[0];
      most[0] = most[l] > most[0] ? most[l] : most[0];
    }
    printf("%a %a", least[0], most[0]);
    for (int l = 0; l < LANES; l++) printf(" %a %a", sum[l], lost[l]);
    printf("\\n");
    fflush(stdout);
  }
}
"""


class Found(NamedTuple):
    """Of one strip: its mean r over the places, in units of the hats, and the least and largest r over its hat."""

    mean: Fraction
    least: float
    most: float


def sums(strips: int, bits: int = law.FINE_BITS) -> Iterator[Found]:
    """Add up r over all places of so many bits, at least 13, strip by strip."""
    series = "(0.0 * e + C)".replace("C", law.SERIES[-1].hex())
    for coefficient in law.SERIES[-2::-1]:
        series = f"({series} * e + {coefficient.hex()})"
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "rest.c", Path(folder) / "rest"
        source.write_text(PROGRAM.replace("SERIES", series))
        flags = ["-O3", "-march=native", "-ffp-contract=off"]
        subprocess.run(["cc", *flags, "-o", str(program), str(source)], check=True)
        asked = "".join(
            f"{strip} {bits} {left.hex()} {box.hex()} {step.hex()}\n"
            for strip, (left, _, box, step) in enumerate(law.tables().numbers.T[:strips].tolist())
        )
        with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdin is not None
            assert running.stdout is not None
            running.stdin.write(asked)
            running.stdin.close()
            for line, hat in zip(running.stdout, law.tables().numbers[1].tolist(), strict=False):
                least, most, *parts = map(float.fromhex, line.split())
                yield Found(sum(map(Fraction, parts), Fraction(0)) / 2**bits, least / hat, most / hat)


def errors(strips: int, bits: int = law.FINE_BITS) -> Iterator[tuple[Found, float, float]]:
    """Yield each strip, the error of the sum up to it over the mass of the rest, and a bound on that of the others."""
    found, total = law.strips(), Fraction(0)
    with localcontext() as context:
        context.prec = 50
        scale = Fraction((2**63 - law.STRIPS) / sum((strip.hat for strip in found), Decimal(0)))
    rest = 1 - Fraction(sum(strip.box + strip.staircase for strip in found), 2**24)
    with mpmath.workdps(60):
        tails = [mpmath.erfc(mpmath.mpf(j) / 64 / mpmath.sqrt(2)) for j in range(strips + 1)]
        beyond = [Fraction(mpmath.nstr(tail, 55)) for tail in tails]
    for j, each in enumerate(sums(strips, bits)):
        mass = beyond[j] - beyond[j + 1]
        total += each.mean / scale - (mass - Fraction(found[j].box + found[j].staircase, 2**24))
        yield each, float(total / rest), 12 * 2.0**-53 * float(beyond[j + 1]) / float(rest)


if __name__ == "__main__":
    for number, (strip, error, others) in enumerate(errors(int(sys.argv[1]) if len(sys.argv) > 1 else law.STRIPS)):
        share = f"{error:.4e} (2^{math.log2(abs(error)):.2f})"
        print(
            f"{number}: r / hat from {strip.least:.6f} to {strip.most:.10f}; error {share}, others at most {others:.1e}"
        )
