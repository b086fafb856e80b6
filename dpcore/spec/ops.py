"""The port: the mathematics, shapes, guarantees and edge cases of each operation of a backend.

A backend is a module with the members of `Backend`. The fused operation `step` is *defined* as the composition of
`normal`, `correlate`, `recurrence` and `update`; `tests/agreement/agreement.py` says how closely two must agree.

Arrays are the backend's own: NumPy arrays under "numpy", torch tensors under "triton". Operations never write to an
argument unless its description says "in place", and accept arrays of size zero.

Arrays of examples (rows, inputs, gradients) may be of 16 bits, each with a dtype of its own: float16, or bfloat16,
which NumPy lacks. They represent the float32 arrays of the same numbers, and are widened a piece at a time: results
are those of the float32 arrays, to the bit, but where a tensor core multiplies 16 bits as they are.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from dpcore.spec.pair_ops import PairOperations
from dpcore.spec.rounded_normal import FRACTION_BITS

A = TypeVar("A")
T = TypeVar("T")

CLIP_RULES: Final = ("standard", "automatic", "automatic_v", "normalized", "psac")
AUTOMATIC_STABILITY: Final = 0.01
PSAC_STABILITY: Final = 0.1
LEAST_FACTOR: Final = 2.0**-1000
# The bits of a float64 number that a weight keeps where arrays are float32: the first 24 of its mantissa.
LEADING_BITS: Final = -(1 << 29)
# Update rule -> number of state vectors: momentum; first and second moment; the sum of squares; the sequences z and y.
UPDATE_RULES: Final = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 2, "adamw": 2, "adagrad": 1, "accelerated": 2}
# Rules with a second moment, and its place among the state vectors.
SECOND_MOMENT: Final = {"adam": 1, "adamw": 1, "adagrad": 0}
# Inputs of the second moment: see `Backend.step`.
SQUARES: Final = ("filtered", "released", "separate", "given")
# The vector of a step that a ring keeps: see `RingCoefficients`.
KEPT: Final = ("output", "input")


class FilterCoefficients(NamedTuple):
    """One step of a linear filter: ``y = b[0] x + ... - a[0] y_{t-1} - ...``, divided by `normalizer`.

    `a` is a_1..a_na (the leading 1 is left out), `b` is b_0..b_nb. They may differ from step to step.
    """

    b: tuple[float, ...]
    a: tuple[float, ...]
    normalizer: float = 1.0


class RingCoefficients(NamedTuple):
    """One step of a sum over a ring of the last m = len(weights) vectors, which are found by their places.

    ``n = (z + sum_j weights[j - 1] v_j) / normalizer`` with v_j the vector kept j steps ago, at ``place - j``; places
    count modulo m. `keeps` is the vector that this step stores at `place`, instead of v_m: its "output" n or "input" z.
    """

    weights: tuple[float, ...]
    place: int
    normalizer: float = 1.0
    keeps: str = "output"


Correlation = FilterCoefficients | RingCoefficients
"""One step of correlated noise: see `Backend.correlate`."""


class NoiseRow(NamedTuple):
    """Row `row` of a stream, scaled: standard normals times `scale`, the standard deviation on the *sum*.

    They are on a grid of `bits` binary digits (`dpcore.spec.grid`).
    """

    key: bytes
    row: int
    stream: int
    scale: float
    rng: str = "chacha20"
    bits: int = FRACTION_BITS

    def __repr__(self) -> str:
        """Leave the key out: representations end in logs and tracebacks."""
        return f"NoiseRow(row={self.row}, stream={self.stream}, scale={self.scale}, rng={self.rng!r}, bits={self.bits})"


class UpdateSettings(NamedTuple):
    """Numbers of an update rule; rules ignore those that they do not use.

    `beta1` is the momentum under "momentum" and "nesterov". `bias` is subtracted from the second moment, and `floor` is
    the least denominator. `weight` (eta_t) and `coupling` (tau_{t+1}) belong to "accelerated".
    """

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    bias: float = 0.0
    floor: float = 0.0
    weight: float = 1.0
    coupling: float = 0.0


class Slot(NamedTuple, Generic[A]):
    """One tensor of a run, as `step` works on it; all arrays have the parameter's size.

    Those that are not marked "read only" are changed in place.
    """

    parameter: A  #: x_t, becomes x_{t+1}
    total: A  #: float64, read only: the sum of the clipped per-example vectors, integers in units of the grid's step
    first: int  #: stream element of the first coordinate
    filter_state: tuple[A, ...] = ()  #: of the filters, one after the other: `order` vectors each (direct form II)
    moments: tuple[A, ...] = ()  #: state of the update rule, ``UPDATE_RULES[rule]`` vectors
    displacement: A | None = None  #: receives x_{t+1} - x_t if a query needs it
    noise_state: tuple[A, ...] = ()  #: float64, correlates the noise: **secret**
    scale: A | None = None  #: read only: the factors of the per-example vectors; the average is divided by it
    square: A | None = None  #: read only: the second moment's input under "given"


class Backend(PairOperations[A], Protocol[A]):
    """The port. See the module's docstring."""

    @property
    def name(self) -> str:
        """Name under which `dpcore.set_backend` finds the backend."""

    @property
    def arrays(self) -> str:
        """Library of its arrays: "numpy" or "torch"."""

    def from_numpy(self, values: NDArray[Any]) -> A:
        """Return a contiguous copy of `values`, of the same dtype, in the backend's memory."""

    def to_numpy(self, array: A) -> NDArray[Any]:
        """Return a copy of `array` as a NumPy array of the same dtype, of bfloat16 as float32."""

    def zeros_like(self, array: A, dtype: str | None = None) -> A:
        """Return contiguous zeros of the shape and place of `array`, of `dtype` ("float32", "float64") or its own."""

    def beside(self, array: A) -> AbstractContextManager[None]:
        """Return a context in which `from_numpy`, `words` and `normal` make their arrays on the device of `array`.

        A backend of one place has nothing to do; with several GPUs the current one need not be the model's.
        """

    def clear(self, arrays: Sequence[A]) -> None:
        """Set arrays to 0, in place."""

    def repeat(self, work: Callable[..., T], *args: Any) -> T:
        """Return ``work(*args)``, which a backend may have recorded when it was called with the same arguments.

        `work` is a function of its arguments only: operations of this port on their arrays, and on those made of them.
        It reads no values into Python, and changes only arrays, in place. The result may use an earlier call's memory.
        """

    def words(
        self, key: bytes, row: int, stream: int, start: int, size: int, *, part: int = 0, rng: str = "chacha20"
    ) -> A:
        """Return words `start` .. `start + size` of a row: uint32 (int32 of the same bits if torch lacks uint32).

        Guarantees
        ----------
        The same bits on every backend and machine, and for every cut of a range into pieces.
        """

    def normal(
        self,
        key: bytes,
        row: int,
        stream: int,
        start: int,
        size: int,
        *,
        bits: int = FRACTION_BITS,
        rng: str = "chacha20",
    ) -> A:
        """Return standard normals of elements `start` .. `start + size` on a grid: float64 multiples of 2^-bits.

        They are ``floor(2^bits Z) 2^-bits`` with Z standard normal, drawn from words of parts 0 and 1, and few from
        others: `dpcore.spec.rounded_normal` has the definition and the proof. `bits` is at most 36; with fewer,
        the same draws are rounded down further.

        Guarantees
        ----------
        The same bits on every backend and machine, and for every cut of a range into pieces.
        """

    def row_norms(self, rows: Sequence[A], scale: Sequence[A | None] | None = None) -> A:
        """Return the L2 norm of each example's vector: (B,) float64.

        Parameters
        ----------
        rows : sequence of (B, d_l) arrays
            The blocks of the B vectors, of any of the dtypes above; the norm is that of their concatenation.
        scale : sequence of (d_l,) arrays or None, optional
            Coordinates are multiplied by it first, in float64.

        Guarantees
        ----------
        Relative to the true norm at least ``1 - (d + 8) 2^-53``, with d the sum of d_l, and at most ``1 + 2^-17``: a
        backend that adds squares in less than float64 raises the result by the possible loss. So for every finite
        float32 input (neither 1e38 nor a denormal overflows or underflows). A non-finite entry gives a non-finite
        norm.
        """

    def group_norms(
        self, rows: Sequence[A], groups: Sequence[int], scale: Sequence[A | None] | None = None
    ) -> Sequence[A]:
        """Return `row_norms` of the blocks of each group: G arrays (B,) float64.

        ``groups[l]`` is the number of the l-th block's group; each of 0 .. G - 1 has a block. A block without a scale
        has None.
        """

    def combine(self, first: Sequence[A], second: Sequence[A], weights: tuple[float, float]) -> Sequence[A]:
        """Return ``weights[0] * first[l] + weights[1] * second[l]`` for (B, d_l) arrays of one dtype: fresh arrays.

        Two products and a sum, each rounded to the arrays' dtype, of 16 bits to float32.
        """

    def clip_factors(
        self,
        norms: Sequence[A],
        rule: str,
        bounds: Sequence[float],
        sizes: Sequence[int],
        roundings: Sequence[float],
        unit: float,
    ) -> Sequence[A]:
        """Return the factor of each example in each group, divided by the grid's step: G arrays (B,) of float64.

        Parameters
        ----------
        norms : sequence of G arrays (B,) float64
            From `row_norms`, one array for each group.
        rule : str
            One of `CLIP_RULES`: with N the norm and C the bound, "standard" min(1, C/N), "automatic" C/(N + 0.01),
            "automatic_v" C/N (0 for N = 0), "normalized" min(1, C/N)/C, "psac" C/(N + r/(N + r)) with r = 0.1.
        bounds, sizes : sequences of length G
            Clip norm C and number of coordinates d of each group.
        roundings : sequence of length G
            r: how far, in steps, rounding to the grid moves an example's addend to the group (`contributions`).
        unit : float
            u: the grid's step.

        Guarantees
        ----------
        *Certified*: ``w N + r <= C / u`` for the returned w and the true norm N (1 / u under "normalized"), so that
        an example's addend is at most as long as the clip norm. N is first raised by its own error bound (``1 + (d +
        8) 2^-53``), and ``C - r u`` replaces C, lowered by 2^-50 of itself for later roundings. "standard" is exactly
        1 / u if the raised N is at most that. An example with a non-finite norm in *any* group has weight 0 in all, and
        one with a factor below `LEAST_FACTOR` has weight 0 in that group. A backend of float32 arrays may drop all of a
        weight but its `LEADING_BITS`, so that its product with an entry needs no rounding in float64.
        """

    def weighted_sum(
        self,
        rows: Sequence[A],
        weights: Sequence[A],
        out: Sequence[A],
        scale: Sequence[A | None] | None = None,
        longest: Sequence[float] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Add ``sum_i nearest(weights[l][i] * rows[l][i])`` to ``out[l]``; rows times ``scale[l]`` if it is given.

        Parameters
        ----------
        rows : sequence of (B, d_l) arrays
        weights : sequence of (B,) float64 arrays
        out : sequence of (d_l,) float64 arrays, in place
            Contiguous; of integers.
        scale : sequence of (d_l,) arrays or None, optional
            Float32 or float64. A scaled entry is a product in float64, exact for float32, here as in `row_norms`.
        longest : sequence of floats, optional
            One for each block: no ``w_i N_i`` exceeds it. A backend of float32 arrays may then do without float64,
            which adds the same integers for weights of its `clip_factors`.
        overwrite : bool
            Whether the sums take the place of what `out` holds, whatever that is.

        Guarantees
        ----------
        The same bits on every backend, for any order of the examples: products are formed in float64 and rounded to
        integers (`dpcore.spec.grid.nearest`), whose additions are exact below 2^53. A scaled entry is one product
        before the weight's. A row of weight 0 adds exactly 0, even if it has NaN or infinities.
        """

    def recurrence(self, x: A, state: Sequence[A], coefficients: FilterCoefficients) -> A:
        """Advance a linear filter by one step in transposed direct form II and return its normalized output.

        ``y = b_0 x + s_1;  s_k <- b_k x - a_k y + s_{k+1};  return y / normalizer`` with s in place, coefficients
        beyond the ends of `a` and `b` taken as 0. `state` has at least max(len(a), len(b) - 1) vectors. The result may
        share its memory with `x`.
        """

    def correlate(self, z: A, state: Sequence[A], coefficients: Correlation, *, bits: int = FRACTION_BITS) -> A:
        """Return one step of correlated noise, not divided by its normalizer, on the grid of `z`; `state` advances.

        Parameters
        ----------
        z : (d,) float64 array
            From `normal`, of the same `bits`.
        state : sequence of (d,) float64 arrays, in place
            Zeros before the first step. As many as the ring has weights, or the recurrence's order.
        coefficients : RingCoefficients or FilterCoefficients
            A recurrence has ``b[0] = 1``.

        Notes
        -----
        ``m = z + nearest(2^bits r) 2^-bits`` with `dpcore.spec.grid.nearest`, in float64:

        - ring: ``r = 0 + weights[0] v_1 + weights[1] v_2 + ...``, added in this order; then ``vectors[place]`` becomes
          ``m (1 / normalizer)``, or z under ``keeps="input"``; without vectors nothing is kept, and r is 0;
        - recurrence: ``r = s_1``, and with ``x = m - r``, which is z with the rounding of r, ``s_k <- (b_k x - a_k m) +
          s_{k+1}``, coefficients beyond the ends of `a` and `b` taken as 0.

        Guarantees
        ----------
        The same bits on every backend. The result may share its memory with `z`.
        """

    def update(
        self,
        rule: str,
        parameter: A,
        direction: A,
        moments: Sequence[A],
        settings: UpdateSettings,
        step_number: int,
        square: A | None = None,
    ) -> None:
        """Move `parameter` along `direction` by a first-order rule, in place, `moments` too. `step_number` is from 1.

        With x, g, lr, wd, b1, b2 = parameter, direction, learning_rate, weight_decay, beta1, beta2:

        - sgd: ``x <- x - lr (g + wd x)``
        - momentum: ``m <- b1 m + (g + wd x);  x <- x - lr m``
        - nesterov: ``g <- g + wd x;  m <- b1 m + g;  x <- x - lr (g + b1 m)``
        - adam: ``g <- g + wd x;  m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) h;``
          ``x <- x - lr (m / (1-b1^t)) / D(v / (1-b2^t))``
        - adamw: ``x <- (1 - lr wd) x``, then adam with wd = 0
        - adagrad: ``g <- g + wd x;  v <- v + h;  x <- x - lr g / D(v)``
        - accelerated: ``z <- z - lr g;  y <- x - (lr / weight) g;  x <- (1 - coupling) y + coupling z``, with moments
          (z, y) and no weight decay

        with ``D(u) = sqrt(max(u - bias, floor^2)) + eps``; if D is 0 the coordinate does not move. h is `square`,
        or g^2 (after weight decay) if that is None.
        """

    def step(
        self,
        slots: Sequence[Slot[A]],
        noise: NoiseRow,
        batch_size: float,
        filters: Sequence[FilterCoefficients],
        rule: str,
        settings: Sequence[UpdateSettings],
        step_number: int,
        *,
        unit: float,
        correlation: Correlation | None = None,
        square: str = "filtered",
        square_noise: NoiseRow | None = None,
    ) -> None:
        """Noise, filters and update of every tensor in one pass over memory, in place.

        For each slot, with z its normals (none are drawn if ``noise.scale`` is 0, and m is 0):

        - ``m = correlate(z, noise_state, correlation)``; m = z if `correlation` is None; if ``noise.scale`` is 0 the
          state does not change;
        - the grid's step is ``u = unit``: ``(noise.scale / normalizer) 2^-bits``, with the correlation's normalizer, or
          1, and any positive number if ``noise.scale`` is 0;
        - ``g = (total + 2^bits m) (u / batch_size)`` in float64, rounded to the parameter's dtype (after the noise, so
          that the rounding reveals nothing), then divided by the slot's ``scale`` if it has one;
        - ``y = g`` through each of `filters`, one after the other: each takes ``max(len(a), len(b) - 1)`` of the
          slot's ``filter_state``, which has no others;
        - ``h``, the second moment's input, by `square`:
          "filtered": y^2 (`update`'s own);
          "released": g^2;
          "separate": ``(nearest(q^2 (1 / u')) + 2^bits z') u'`` in float64, then rounded, with ``q = total (u /
          batch_size)`` (divided by the slot's scale if it has one), z' the normals of `square_noise` and ``u' =
          square_noise.scale 2^-bits``; q^2 if that is None or its scale is 0;
          "given": the slot's ``square``;
        - ``update(y, h);  displacement = x_{t+1} - x_t``.
        """
