"""A step as the composition of the port's plain operations, for methods that the fused operation does not cover.

Noise that is made of several rows of the stream, filters and learning rates that depend on the releases, GaLore's
subspaces, delayed second moments, noise that the caller supplies, and steps whose released averages someone wants.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpcore.mechanism.noise_state import Rows, correlated, normalizer_of, rows_of
from dpcore.mechanism.peers import Peers
from dpcore.mechanism.preparation import correction
from dpcore.mechanism.vectors import RunVectors
from dpcore.spec.check import order_of
from dpcore.spec.grid import nearest, step_of
from dpcore.spec.grid import released as on_grid
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import Backend, NoiseRow, Slot, UpdateSettings
from dpcore.stages.method import Method
from dpcore.stages.queries import Phase

Normals = Callable[[int, int], Sequence[Any]]
"""Standard normals of a row and stream, a flat array for each tensor."""

Observer = Callable[[Sequence[Any], Sequence[Any]], None]
"""Called with the released averages g_t and the filter's outputs."""


@dataclass(frozen=True)
class Composition:
    """The settings and places that a composed step needs; see `dpcore.mechanism.mechanism.Mechanism`."""

    backend: Backend[Any]
    method: Method
    batch_size: float
    keys: RunKeys
    layout: Layout
    vectors: RunVectors
    rng: str
    peers: Peers
    dimension: int  # of all processes' pieces together
    steps: int  # planned

    def step(
        self,
        slots: Sequence[Slot[Any]],
        noise: NoiseRow,
        unit: float,
        square: str,
        square_noise: NoiseRow,
        statistics: tuple[float, ...],
        numbers: Sequence[UpdateSettings],
        normals: Normals | None,
        observe: Observer | None,
    ) -> tuple[float, ...]:
        """Take one step; see `dpcore.spec.ops.Backend.step`. Returns the adaptive stage's statistics after it."""
        released, squares = [], []
        for i, slot in enumerate(slots):
            factor = unit / self.batch_size
            if noise.scale:
                g = on_grid(slot.total, self._noise(i, noise, slot.noise_state, normals), noise.bits, factor)
            else:
                g = slot.total * factor
            released.append(_unscaled(self._cast(g, slot.parameter), slot))
            squares.append(self._square(i, slot, released[i], factor, square, square_noise, normals))
        if self.method.filter.adaptive:
            outputs, statistics = self._adapted(released, statistics, noise)
        elif self.method.galore is not None:
            if noise.row % self.method.galore.every == 0:
                self._project_anew(released)
            low = [self._projected(i, g) for i, g in enumerate(released)]
            outputs = [self._filtered(g, slot, noise.row) for g, slot in zip(low, slots, strict=True)]
            if square == "released":
                squares = [g * g for g in low]
        else:
            outputs = [self._filtered(g, slot, noise.row) for g, slot in zip(released, slots, strict=True)]
        if observe is not None:
            observe(released, [self._mapped_back(i, y) for i, y in enumerate(outputs)])
        if self.vectors.reference is not None:
            statistics = self._searched(self.vectors.reference, released, slots, statistics, noise)
            numbers = [used._replace(learning_rate=statistics[0] * used.learning_rate) for used in numbers]
        if self.vectors.unscaled is not None:
            numbers, squares = self._delayed(self.vectors.unscaled, released, slots, numbers, noise.row)
            fresh = [self.backend.zeros_like(slot.moments[-1]) for slot in slots]
            slots = [slot._replace(moments=(*slot.moments[:-1], nu)) for slot, nu in zip(slots, fresh, strict=True)]
        for i, slot in enumerate(slots):
            self._move(i, slot, outputs[i], squares[i], numbers[i], noise.row + 1)
        return statistics

    def _noise(self, i: int, noise: NoiseRow, state: Sequence[Any], normals: Normals | None) -> Any:
        """Row t of C^{-1} Z for one tensor times its normalizer, float64 on the grid."""
        entry, strategy = self.layout.entries[i], self.method.noise.strategy
        normal = rows_of(self.backend, self.keys, noise.stream, entry, noise.bits, self.rng)
        if normals is not None:
            normal = self._given(normals, noise, i)
        if strategy is None:
            return normal(noise.row)
        return correlated(self.backend, strategy, noise.row, state, normal, noise.bits)

    def _given(self, normals: Normals, noise: NoiseRow, i: int) -> Rows:
        """Rows that the caller supplies, rounded to the grid."""

        def normal(row: int, start: int = 0, stop: int | None = None) -> Any:
            z = normals(row, noise.stream)[i][start:stop]
            wide = self.backend.zeros_like(z, "float64")
            wide[...] = z
            return nearest(wide * 2.0**noise.bits) * 2.0**-noise.bits

        return normal

    def _cast(self, array: Any, like: Any) -> Any:
        """Return the array in the dtype of `like`."""
        if array.dtype == like.dtype:
            return array
        cast = self.backend.zeros_like(like)
        cast[...] = array
        return cast

    def _square(
        self, i: int, slot: Slot[Any], g: Any, factor: float, square: str, noise: NoiseRow, normals: Normals | None
    ) -> Any:
        """Return the second moment's input, or None for the square of the filter's output."""
        if square == "filtered":
            return None
        if square == "released":
            return g * g
        if square == "given":
            return slot.square
        q = _unscaled(slot.total * factor, slot)
        h = q * q
        if noise.scale:
            u = step_of(noise.scale, noise.bits, normalizer_of(self.method.noise.strategy, noise.row))
            m = self._noise(i, noise, self.vectors.square_noise_state[i], normals)
            h = on_grid(nearest(h * (1 / u)), m, noise.bits, u)
        return self._cast(h, slot.parameter)

    def _filtered(self, g: Any, slot: Slot[Any], row: int) -> Any:
        y, done = g, 0
        for coefficients in self.method.filter.coefficients(row):
            order = order_of(coefficients)
            y = self.backend.recurrence(y, slot.filter_state[done : done + order], coefficients)
            done += order
        return y

    def _adapted(
        self, released: Sequence[Any], statistics: tuple[float, ...], noise: NoiseRow
    ) -> tuple[list[Any], tuple[float, ...]]:
        """Weight this and the last released averages by their estimate of the gradient's autocorrelation."""
        adaptive: Any = self.method.filter
        kept = min(noise.row, adaptive.memory)
        now = self._power(released)
        products = [now]
        for lag in range(kept):
            # <g, h> from norms, which the port sums in float64: (||g + h||^2 - ||g||^2 - ||h||^2) / 2.
            before = [past[lag] for past in self.vectors.past]
            both = self._power([g + h for g, h in zip(released, before, strict=True)])
            products.append((both - now - self._power(before)) / 2)
        power = self.dimension * (noise.scale / self.batch_size) ** 2
        statistics = adaptive.observe(statistics, products, power)
        weights = adaptive.weights(statistics, noise.row)
        outputs = []
        for past, g in zip(self.vectors.past, released, strict=True):
            y = weights[0] * g
            for lag in range(kept):
                y = y + weights[lag + 1] * past[lag]
            outputs.append(y)
            past.insert(0, past.pop())
            past[0][...] = g
        return outputs, statistics

    def _delayed(
        self,
        sums: Sequence[Any],
        released: Sequence[Any],
        slots: Sequence[Slot[Any]],
        numbers: Sequence[UpdateSettings],
        row: int,
    ) -> tuple[list[UpdateSettings], list[Any]]:
        """Take an unscaled step's release into the delayed second moment; return by what the step divides, squared.

        The rule then gets that as the only input of a second moment, its last one, that begins at 0: with beta2 = 0.
        """
        method, query = self.method, self.method.preconditioning
        assert query is not None
        moments = [slot.moments[-1] for slot in slots]
        if query.phase(row) is not Phase.UNSCALED:
            squares = [nu / correction(method, n.beta2, row) for nu, n in zip(moments, numbers, strict=True)]
            return [used._replace(beta2=0.0) for used in numbers], squares
        for total, g in zip(sums, released, strict=True):
            total[...] = g + total if row % query.cycle else g
        if query.averages(row + 1) > query.averages(row):
            for nu, total, used in zip(moments, sums, numbers, strict=True):
                kept, new = (used.beta2, 1 - used.beta2) if "adam" in method.update.rule else (1.0, 1.0)
                nu[...] = kept * nu + new * (total / query.unscaled_steps) ** 2
        return [used._replace(beta2=0.0, eps=0.0, floor=0.0) for used in numbers], [
            self.backend.zeros_like(nu) + 1 for nu in moments
        ]

    def _searched(
        self,
        reference: Sequence[Any],
        released: Sequence[Any],
        slots: Sequence[Slot[Any]],
        statistics: tuple[float, ...],
        noise: NoiseRow,
    ) -> tuple[float, ...]:
        """Take the release into the schedule's evidence; after a change the way begins at the present parameters."""
        schedule: Any = self.method.schedule
        if statistics[0] == 0:
            now = schedule.begin(self._power(released), self.steps)
        elif not schedule.searches(noise.row, self.steps):
            return statistics
        else:
            way = [slot.parameter - start for slot, start in zip(slots, reference, strict=True)]
            power, distance, product = self._power(released), self._power(way), 0.0
            if power > 0 and distance > 0:
                # From norms as above, of vectors of length 1: g and the way differ by orders of magnitude.
                a, b = power**-0.5, distance**-0.5
                both = self._power([a * g + b * d for g, d in zip(released, way, strict=True)])
                product = (both - 2) / 2 / (a * b)
            now = schedule.observe(statistics, product, (noise.scale / self.batch_size) ** 2 * distance)
        if now[0] != statistics[0]:
            for start, slot in zip(reference, slots, strict=True):
                start[...] = slot.parameter
        return tuple(now)

    def _power(self, vectors: Sequence[Any]) -> float:
        own = float(self.backend.row_norms([vector.reshape(1, -1) for vector in vectors])[0]) ** 2
        return self.peers.added([own])[0]

    def _project_anew(self, released: Sequence[Any]) -> None:
        galore = self.method.galore
        assert galore is not None
        for i, p in self.vectors.projections.items():
            gradient = self.backend.to_numpy(released[i]).reshape(self.layout.entries[i].shape)
            p[...] = self.backend.from_numpy(galore.projection(gradient, self.backend.to_numpy(p)))

    def _projected(self, i: int, vector: Any) -> Any:
        """P^T V, flat, of a tensor that is projected; any other as it is."""
        if i not in self.vectors.projections:
            return vector
        return (self.vectors.projections[i].T @ vector.reshape(self.layout.entries[i].shape)).reshape(-1)

    def _mapped_back(self, i: int, vector: Any) -> Any:
        if i not in self.vectors.projections:
            return vector
        columns = self.layout.entries[i].shape[1]
        return (self.vectors.projections[i] @ vector.reshape(-1, columns)).reshape(-1)

    def _move(self, i: int, slot: Slot[Any], y: Any, h: Any, numbers: UpdateSettings, step_number: int) -> None:
        before = slot.parameter + 0 if slot.displacement is not None else None
        rule = self.method.update.rule
        if i not in self.vectors.projections:
            self.backend.update(rule, slot.parameter, y, slot.moments, numbers, step_number, h)
        else:
            # The rule moves a parameter of the subspace that starts at 0; weight decay belongs to the whole parameter.
            if rule == "adamw":
                slot.parameter[...] = (1 - numbers.learning_rate * numbers.weight_decay) * slot.parameter
            elif numbers.weight_decay:
                y = y + numbers.weight_decay * self._projected(i, slot.parameter)
            move = self.backend.zeros_like(y)
            self.backend.update(rule, move, y, slot.moments, numbers._replace(weight_decay=0.0), step_number, h)
            slot.parameter[...] = slot.parameter + self._mapped_back(i, move)
        if slot.displacement is not None:
            slot.displacement[...] = slot.parameter - before


def _unscaled(vector: Any, slot: Slot[Any]) -> Any:
    return vector if slot.scale is None else vector / slot.scale
