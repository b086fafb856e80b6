"""Break the mechanism on purpose, in a copy, and name the tests that notice: `make mutations`.

Each mutation replaces one piece of one file. One that no test notices is a failure of the tests, and of this script.
Arguments choose mutations by a part of their name; by default all are made.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["tests/papers", "tests/spec", *(f"tests/unit/test_{name}.py" for name in (
    "clip", "filters", "step", "updates", "mechanism", "minimize", "plan", "accounting_rdp", "accounting_gaussian",
    "torch_training",
))]  # fmt: skip


class Mutation(NamedTuple):
    """What is broken, where, and how."""

    name: str
    path: str
    old: str
    new: str
    tests: str = ""
    """Run these instead of all of `TESTS`: for kernels, and for mutations with a test of their own."""


NUMPY = "backends/dpcore_numpy"
MUTATIONS = [
    Mutation(
        "halve the noise",
        "dpcore/plan.py",
        "return self.sensitivity.standard_deviation(self.noise_multiplier)",
        "return 0.5 * self.sensitivity.standard_deviation(self.noise_multiplier)",
    ),
    Mutation("drop the clip", "dpcore/mechanism.py", "weights[i] = factor", "weights[i] = 0 * factor + 1"),
    Mutation(
        "swap two coefficients of a named filter",
        "dpcore/filters/named.py",
        '"first-order v2": ((3 / 11, -1 / 11)',
        '"first-order v2": ((-1 / 11, 3 / 11)',
    ),
    Mutation(
        "swap the filter's coefficients on their way to the backend",
        "dpcore/filters/low_pass.py",
        "FilterCoefficients(self.b, self.a,",
        "FilterCoefficients(self.b[::-1], self.a,",
    ),
    Mutation(
        "divide by one example less",
        "dpcore/mechanism.py",
        "                self.plan.batch_size,",
        "                self.plan.batch_size - 1,",
    ),
    Mutation(
        "draw the same row of noise at every step",
        "dpcore/mechanism.py",
        "NoiseRow(self.keys.noise, row,",
        "NoiseRow(self.keys.noise, 0,",
    ),
    Mutation(
        "sensitivity of the groups' mean instead of their root sum of squares",
        "dpcore/clipping/clip.py",
        "math.sqrt(math.fsum(bound**2 for bound in grouping.bounds))",
        "math.fsum(grouping.bounds) / len(grouping.bounds)",
    ),
    Mutation(
        "account for half of the steps",
        "dpcore/plan.py",
        "return self.sampler.event(sigma, steps)\n",
        "return self.sampler.event(sigma, (steps + 1) // 2)\n",
    ),
    Mutation(
        "trust the measured norm",
        f"{NUMPY}/clip.py",
        "lowered = (bound - underflow) * (1 - 2 * float(info.eps))",
        "lowered = bound",
        "tests/unit/test_clip.py",
    ),
    Mutation(
        "accumulate norms in float32",
        f"{NUMPY}/clip.py",
        'squares += np.einsum("ij,ij->i", values, values)',
        "squares += np.square(values, dtype=np.float32).cumsum(axis=1)[:, -1]; squares = np.float32(squares) + 0.0",
        "tests/unit/test_clip.py",
    ),
    Mutation(
        "multiply a NaN row by zero",
        f"{NUMPY}/clip.py",
        "if used.all():",
        "if True:",
        "tests/unit/test_clip.py",
    ),
    Mutation(
        "take the clip norm for the normalized rule's sensitivity",
        "dpcore/clipping/clip.py",
        "return Sensitivity(math.sqrt(len(grouping.bounds)))",
        "return Sensitivity(self.max_grad_norm)",
        "tests/papers/test_methods.py",
    ),
    Mutation(
        "forget the bias correction",
        f"{NUMPY}/filter.py",
        "return y if normalizer == 1 else y / normalizer",
        "return y",
        "tests/papers/test_methods.py",
    ),
    Mutation(
        "start DiSK's average at zero",
        "dpcore/filters/averaging.py",
        "(1.0 if step == 0 else self.kappa,)",
        "(self.kappa,)",
        "tests/papers/test_methods.py",
    ),
    Mutation(
        "invert DiSK's weight",
        "dpcore/queries/two_point.py",
        "(1 - k) / (k * self.gamma)",
        "k / ((1 - k) * self.gamma)",
        "tests/papers/test_methods.py",
    ),
    Mutation(
        "leave the sum to the next step",
        "dpcore/mechanism.py",
        "total[...] = 0",
        "pass",
        "tests/unit/test_mechanism.py",
    ),
    Mutation(
        "take a row as spent only after the draw",
        "dpcore/mechanism.py",
        "        self.step += 1\n        self.releases += 1\n        try:",
        "        self.releases += 1\n        try:",
        "tests/unit/test_mechanism.py",
    ),
    Mutation(
        "resume under the same noise",
        "dpcore/mechanism.py",
        "if fork else saved",
        "if False else saved",
        "tests/unit/test_mechanism.py",
    ),
    Mutation(
        "forget which rows were released",
        "dpcore/keys.py",
        "if row < _begun.get(digest, 0):",
        "if row < 0:",
        "tests/unit/test_mechanism.py",
    ),
    Mutation(
        "leave abandoned steps out of epsilon",
        "dpcore/plan.py",
        "return self.sampler.event(sigma, steps + abandoned)",
        "return self.sampler.event(sigma, steps)",
        "tests/unit/test_mechanism.py",
    ),
    Mutation(
        "drop the normals' tail",
        f"{NUMPY}/noise.py",
        "TAIL_BOUND = 4096",
        "TAIL_BOUND = 0",
        "tests/spec/test_normal.py",
    ),
    Mutation(
        "lose the digits of ln u next to u = 1",
        f"{NUMPY}/noise.py",
        "from_one = np.log1p(v, out=v)",
        "from_one = np.log(1 + v)",
        "tests/spec/test_normal.py",
    ),
    Mutation(
        "change a rotation of ChaCha20",
        f"{NUMPY}/stream.py",
        "(c, d, b, 7))",
        "(c, d, b, 8))",
        "tests/spec/test_stream.py",
    ),
    Mutation(
        "sample at another rate than accounted",
        "dpcore/sampling/poisson.py",
        "threshold = round(self.sample_rate * _WORDS)",
        "threshold = round(1.1 * self.sample_rate * _WORDS)",
        "tests/unit/test_sampling_samplers.py",
    ),
    Mutation(
        "halve the noise, in the kernel",
        "backends/dpcore_triton/step.py",
        "g += scales[0] * n",
        "g += 0.5 * scales[0] * n",
        tests="tests/agreement/test_ops_step.py",
    ),
    Mutation(
        "swap the sine and the cosine, in the kernel",
        "backends/dpcore_triton/noise.py",
        "return rho * cosine, rho * sine",
        "return rho * sine, rho * cosine",
        tests="tests/agreement/test_ops_step.py",
    ),
    Mutation(
        "drop the clip, in the kernel",
        "backends/dpcore_triton/clip.py",
        "return tl.where(raised <= bound, 1.0, room / raised)",
        "return tl.where(raised <= bound, 1.0, 1.0)",
        tests="tests/agreement/test_ops_clip.py",
    ),
]


def copy_to(folder: Path) -> None:
    """Copy the working tree as git sees it: tracked files and new ones, without what is ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                archive.add(ROOT / name, arcname=name)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        archive.extractall(folder, filter="data")


def red(folder: Path, arguments: list[str]) -> list[str]:
    """Run the tests and return those that fail."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-profile=mutation",
            "-n",
            "2",
            *arguments,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[| |$)", done.stdout, flags=re.MULTILINE)))


def main() -> int:
    """Run every mutation; the exit status is the number of those that nothing noticed."""
    chosen = [one for one in MUTATIONS if any(part in one.name for part in sys.argv[1:] or [""])]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy_to(folder)
        before = red(folder, sorted({name for one in chosen for name in ([one.tests] if one.tests else TESTS)}))
        if before:
            raise SystemExit(f"these tests fail without any mutation: {', '.join(before)}")
        for mutation in chosen:
            path = folder / mutation.path
            text = path.read_text()
            if text.count(mutation.old) != 1:
                raise SystemExit(
                    f"{mutation.path}: {mutation.old!r} must stand there once; the mutation is out of date"
                )
            path.write_text(text.replace(mutation.old, mutation.new))
            noticed = red(folder, [mutation.tests] if mutation.tests else TESTS)
            path.write_text(text)
            unnoticed += not noticed
            print(f"\n{mutation.name} ({mutation.path}): {len(noticed) or 'NO'} tests notice")
            print("\n".join(f"  {name}" for name in noticed), flush=True)
    return unnoticed


if __name__ == "__main__":
    sys.exit(main())
