"""The port's operations on pairs: per-example gradients as activations and output gradients, never formed.

A linear map ``y = W a`` with W (q, p) has the gradient ``sum_t e_t a_t^T`` for the example with inputs a_t and output
gradients e_t, t = 1..T. Its norm and the clipped sum need the pairs only.

A tensor may be used several times in a model, and at several points of a query (DiSK, DP-PMLF, DP-SRG). So each
operation takes sequences of J *parts*, each with a real weight: part j has T_j rows of every example, and all parts
count as concatenated along time. T is the sum of T_j.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

A = TypeVar("A")


class LinearPairs(NamedTuple, Generic[A]):
    """One linear map's weight gradients: ``v_i = sum_j point_weights[j] sum_t gradients[j][i, t] inputs[j][i, t]^T``.

    v_i is (q, p), in row-major order. All arrays are float32 or of 16 bits, or all are float64.
    """

    inputs: Sequence[A]  #: J arrays (B, T_j, p)
    gradients: Sequence[A]  #: J arrays (B, T_j, q)
    point_weights: Sequence[float]  #: J numbers
    #: Norms by inner products of rows, ``|v|^2 = sum_{s,t} (a_s . a_t)(e_s . e_t)``: T^2 (p + q) multiplications, and
    #: not the T p q of the matrix itself. Without effect if a scale is given, or T is small.
    gram: bool = False
    exact: bool = False  #: in float64 throughout: for combinations that cancel


class PairOperations(Protocol[A]):
    """The part of `dpcore.spec.ops.Backend` that works on pairs.

    Guarantees
    ----------
    *Certified*: the addend of example i at weight w_i is an integer vector k_i, which depends only on that example's
    own arrays and weight, and the norm N_i of the same arguments obeys ``||k_i|| <= w_i N_i + r`` with the r of
    `dpcore.spec.contributions`: all other rounding is in N_i. Sums of them are exact, in any order.

    An example with a NaN, an infinity, or a norm beyond float64 has a norm that is not finite; so has one with a row
    from 2^50 on, or terms from 2^60 on, where 16-bit tensor cores multiply. Otherwise nothing overflows, and if
    squares or products underflow N_i is still a bound: for float32 arrays of any finite values.

    A weight of 0 adds exactly 0, even if the example's arrays have NaN or infinities.
    """

    def linear_way(self, layer: LinearPairs[A], device: Any, *, scaled: bool = False) -> str:
        """Return in words how this backend takes a layer's norms and, if otherwise, its sum on a device.

        Only shapes and dtypes are looked at; `device` is the arrays' once there are any, and `scaled` says whether
        there is a scale.
        """

    def prefers_pairs(self, layer: LinearPairs[A], device: Any) -> bool:
        """Return whether a layer's norms and sum are cheaper as pairs than if each example's matrix is formed.

        Looked at as by `linear_way`; false if that is not known.
        """

    def sliced_rounding(self, layer: LinearPairs[A], longest: float, *, scaled: bool = False) -> float:
        """Return how far coarser factors may move an addend of a layer, in steps of the grid; 0 if there are none.

        `longest` is that of `linear_sums`.
        """

    def copies_halves(self, layer: LinearPairs[A] | None, device: Any, *, scaled: bool = False) -> bool:
        """Return whether norms or sums of a layer, None for a table, copy its arrays of 16 bits to float32 as a whole.

        Looked at as by `linear_way`.
        """

    def linear_norms(self, layers: Sequence[LinearPairs[A]], scales: Sequence[A | None] | None = None) -> tuple[A, ...]:
        """Return an upper bound on the L2 norm of each example's weight gradient: (B,) float64 for each layer.

        Parameters
        ----------
        layers : sequence of LinearPairs
            All of one B; the result for one does not depend on the others.
        scales : sequence of (q p,) arrays or None, optional
            One for each layer: its v_i are multiplied by it, coordinate by coordinate.

        Guarantees
        ----------
        Certified, for the addends of `linear_sums` with the same layers and scales.
        """

    def linear_sums(
        self,
        layers: Sequence[LinearPairs[A]],
        weights: Sequence[A],
        out: Sequence[A],
        scales: Sequence[A | None] | None = None,
        longest: Sequence[float] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Add each example's ``weights[l][i] * v_i`` of each layer l, as integers, to `out[l]`; v_i of `linear_norms`.

        Parameters
        ----------
        layers, scales
            See `linear_norms`.
        weights : sequence of (B,) float64 arrays
            One for each layer.
        out : sequence of (q p,) float64 arrays, in place
            One for each layer, contiguous; of integers.
        longest : sequence of floats, optional
            One for each layer: no ``|w_i| N_i`` exceeds it. A backend may then add a layer of one row by coarser
            factors, for which the clip has left room; and others in integers of 32 bits that hold no longer ones.
        overwrite : bool
            Whether the sums take the place of what `out` holds, whatever that is.

        Guarantees
        ----------
        Either ``k_i = nearest(w_i v~_i)``, with v~_i a product over the example's own rows in float32 or float64, whose
        rounding is in the norm; or, for fewer than `FEW_ROWS` rows without a scale, integer factors as
        `dpcore.spec.contributions` says, in one float64 product over many examples, but for those whose terms cancel
        further than `CANCELLATION`. Which one follows from the example's own arrays. Or, with `longest`,
        factors of two bytes, which leave an example within ``w_i N_i`` plus `sliced_rounding`.
        """

    def embedding_norms(
        self,
        indices: Sequence[A],
        gradients: Sequence[A],
        point_weights: Sequence[float],
        size: int,
        *,
        scale: A | None = None,
    ) -> A:
        """Return an upper bound on the L2 norm of each example's gradient of an embedding: (B,) float64.

        Parameters
        ----------
        indices : sequence of J arrays (B, T_j) of int64
            Rows of the table, below `size`. A negative one adds nothing (a padding token).
        gradients : sequence of J arrays (B, T_j, q)
            Float32 or of 16 bits, or all float64. Row r of v_i, (size, q), is the sum of ``point_weights[j] *
            gradients[j][i, t]`` over all j and t with ``indices[j][i, t] = r``.
        point_weights : sequence of J floats
        size : int
        scale : (size q,) array, optional
            v_i is multiplied by it, coordinate by coordinate.

        Guarantees
        ----------
        Certified, for the addends of `embedding_sum` with the same arguments. No memory of the table's size.
        """

    def embedding_sum(
        self,
        indices: Sequence[A],
        gradients: Sequence[A],
        point_weights: Sequence[float],
        weights: A,
        out: A,
        *,
        scale: A | None = None,
    ) -> None:
        """Add ``sum_i nearest(weights[i] * v_i)`` to `out`, (size q,) float64; v_i is that of `embedding_norms`.

        A token's rows of one example are added first.
        """

    def tied_norms(
        self,
        indices: Sequence[A],
        token_gradients: Sequence[A],
        token_weights: Sequence[float],
        inputs: Sequence[A],
        gradients: Sequence[A],
        point_weights: Sequence[float],
        size: int,
        *,
        exact: bool = False,
    ) -> A:
        """Return an upper bound on the L2 norm of a matrix that is an embedding and a linear map: (B,) float64.

        The matrix is (V, p) with V = `size`, `indices`, `token_gradients` (B, T_j, p) and `token_weights` are those of
        `embedding_norms`; `inputs` (B, T_j, p), `gradients` (B, T_j, V) and `point_weights` those of `LinearPairs`.
        With E and H the two parts, ``|E + H|^2 = |E|^2 + |H|^2 + 2 <E, H>`` and ``<E, H> = sum_{s,t} e_t[index_s]
        (g_s . a_t)``.

        Guarantees
        ----------
        Certified, for the addends of `embedding_sum` and `linear_sums` together with these arguments, and at least
        `dpcore.spec.contributions.CANCELLATION` times the sum of the two parts' norms.
        """

    def tied_row_norms(
        self,
        indices: Sequence[A],
        token_gradients: Sequence[A],
        token_weights: Sequence[float],
        rows: A,
        size: int,
    ) -> A:
        """Return `tied_norms` for a linear map whose part H is formed: `rows` (B, V p).

        ``<E, H> = sum_s g_s . H[index_s]`` takes the rows of H at the example's tokens, and no memory of V p.

        Guarantees
        ----------
        Those of `tied_norms`, for the addends of `embedding_sum` and `weighted_sum`.
        """

    def joined_norms(self, norms: Sequence[Sequence[A]]) -> tuple[A, ...]:
        """Return an upper bound on the norm of vectors side by side, from bounds on theirs: (B,) for each group.

        Parameters
        ----------
        norms : sequence of sequences of (B,) float64 arrays
            One or more of each group, on one device and of one B. One alone is the group's.

        Guarantees
        ----------
        At least the norm of any vectors that the given ones bound, and above the norm of the given ones by no more
        than the rounding of their additions. Nothing overflows on the way; not finite if one of the group is not.
        """
