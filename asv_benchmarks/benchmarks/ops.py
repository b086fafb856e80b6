"""Each operation of the port on each backend, over sizes."""

from __future__ import annotations

from typing import Any

from dpcore.spec.grid import step_of
from dpcore.spec.ops import FilterCoefficients, NoiseRow, Slot, UpdateSettings

from .common import BACKENDS, CHECK, KEY, load, synchronize, values

SIZES = (10_000,) if CHECK else (10_000, 1_000_000)
SECOND_ORDER = FilterCoefficients(b=(1 / 58, 2 / 58, 1 / 58), a=(-92 / 58, 38 / 58))
ADAM = UpdateSettings(learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8)


class _Operation:
    params: Any = (BACKENDS, SIZES)
    param_names = ("backend", "size")

    def setup(self, backend: str, size: int) -> None:
        self.ops = load(backend)
        self.prepare(size)
        self.run(size)  # kernels compile, caches fill
        synchronize(backend)

    def prepare(self, size: int) -> None:
        pass

    def run(self, size: int) -> None:
        raise NotImplementedError

    def array(self, shape: int | tuple[int, ...], seed: int = 0) -> Any:
        return self.ops.from_numpy(values(shape, seed))


class Words(_Operation):
    """32-bit words of the stream."""

    def run(self, size: int) -> None:
        self.ops.words(KEY, 0, 0, 0, size)

    def time_words(self, backend: str, size: int) -> None:
        self.run(size)
        synchronize(backend)


class Normal(_Operation):
    """Standard normals of the stream, float64 on the grid."""

    def run(self, size: int) -> None:
        self.ops.normal(KEY, 0, 0, 0, size)

    def time_normal(self, backend: str, size: int) -> None:
        self.run(size)
        synchronize(backend)

    def peakmem_normal(self, backend: str, size: int) -> None:
        self.run(size)


class RowNorms(_Operation):
    """Norms of 32 per-example vectors."""

    def prepare(self, size: int) -> None:
        self.rows = [self.array((32, size))]

    def run(self, size: int) -> None:
        self.ops.row_norms(self.rows)

    def time_row_norms(self, backend: str, size: int) -> None:
        self.run(size)
        synchronize(backend)


class WeightedSum(_Operation):
    """Weighted sum of 32 per-example vectors."""

    def prepare(self, size: int) -> None:
        self.rows = [self.array((32, size))]
        self.weights = [1e9 * (self.ops.zeros_like(self.array(32), "float64") + self.array(32))]
        self.out = [self.ops.zeros_like(self.array(size), "float64")]

    def run(self, size: int) -> None:
        self.ops.weighted_sum(self.rows, self.weights, self.out)

    def time_weighted_sum(self, backend: str, size: int) -> None:
        self.run(size)
        synchronize(backend)


class Recurrence(_Operation):
    """One step of a second-order filter."""

    def prepare(self, size: int) -> None:
        self.x, self.state = self.array(size), [self.array(size, 1), self.array(size, 2)]

    def run(self, size: int) -> None:
        self.ops.recurrence(self.x, self.state, SECOND_ORDER)

    def time_recurrence(self, backend: str, size: int) -> None:
        self.run(size)
        synchronize(backend)


class Update(_Operation):
    """One step of Adam."""

    def prepare(self, size: int) -> None:
        self.parameter, self.direction = self.array(size), self.array(size, 1)
        self.moments = [self.ops.zeros_like(self.parameter), self.ops.zeros_like(self.parameter)]

    def run(self, size: int) -> None:
        self.ops.update("adam", self.parameter, self.direction, self.moments, ADAM, 1)

    def time_adam(self, backend: str, size: int) -> None:
        self.run(size)
        synchronize(backend)


class Step(_Operation):
    """Noise, second-order filter and Adam in one pass, for four tensors of a quarter of the size each."""

    def prepare(self, size: int) -> None:
        self.slots = [self.slot(size // 4, first=index * (1 << 24)) for index in range(4)]

    def slot(self, size: int, first: int) -> Slot[Any]:
        parameter = self.array(size)
        zeros = [self.ops.zeros_like(parameter) for _ in range(4)]
        total = self.ops.zeros_like(parameter, "float64")
        total[...] = self.array(size, 1)
        return Slot(parameter, total, first, filter_state=tuple(zeros[:2]), moments=tuple(zeros[2:]))

    def run(self, size: int) -> None:
        noise = NoiseRow(KEY, row=0, stream=0, scale=1.1)
        unit = step_of(noise.scale, noise.bits)
        self.ops.step(self.slots, noise, 256.0, (SECOND_ORDER,), "adam", [ADAM] * 4, 1, unit=unit)

    def time_step(self, backend: str, size: int) -> None:
        self.run(size)
        synchronize(backend)

    def peakmem_step(self, backend: str, size: int) -> None:
        self.run(size)


class Reference(_Operation):
    """What the process holds before an operation of this file runs; subtract it from the peak memories."""

    def run(self, size: int) -> None:
        pass

    def peakmem_reference(self, backend: str, size: int) -> None:
        pass
