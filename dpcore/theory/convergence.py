"""What the papers' convergence theorems prescribe and promise, in numbers.

The constants in them (smoothness, gap, deviation) are of the loss. Where they are measured on private data, so are the
numbers returned here, and choosing settings by them is a use of the data. None of these functions calibrates noise.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dpcore.errors import ArgumentError
from dpcore.spec.validate import fraction, integer, non_negative, number, open_unit, positive
from dpcore.theory.analysis.filters import snr


class DiskConvergence(NamedTuple):
    """What theorem 2 of DiSK promises: `bound` on the mean of ||grad F(x_t)||^2 over the steps.

    `clip_factor` times the longest per-example gradient is the least clip norm that never clips; `beta` and `descent`
    are the theorem's beta (the least one) and M_1.
    """

    bound: float
    clip_factor: float
    beta: float
    descent: float


def disk_convergence(
    kappa: float,
    gamma: float,
    learning_rate: float,
    steps: int,
    *,
    smoothness: float,
    initial_gap: float,
    initial_gradient: float,
    noise_power: float,
    gradient_variance: float = 0.0,
    batch_size: float = 1.0,
) -> DiskConvergence:
    """Return the bound of DiSK's theorem 2 under SGD, for vectors that are not clipped.

    Parameters
    ----------
    kappa, gamma : float
        Settings of the method; `kappa` in (0, 1], `gamma` not 0.
    learning_rate : float
        eta.
    steps : int
        T.
    smoothness : float
        L: no example's gradient changes faster.
    initial_gap, initial_gradient : float
        F(x_0) - F* and ||grad F(x_0)||.
    noise_power : float
        d s^2, the expected squared norm of the noise in a released average.
    gradient_variance : float
        sigma_SGD^2: mean squared distance of an example's gradient from the mean.
    batch_size : float
        B.

    Raises
    ------
    ArgumentError
        If the theorem does not hold at these settings: kappa too small, or a learning rate so large that M_1 <= 0.

    Notes
    -----
    With ``M_g = 1 + 4 (2 + 1/kappa + |1 + gamma|) / gamma^2``, ``a = 2 + |1 + gamma| M_g`` and
    ``r = (1 - kappa)^2 (1 + 4 eta^2 L^2 + |1 + gamma| (kappa + 2 eta^2 L^2 M_g)) < 1``::

        beta  = (eta (1 - kappa) / 2 + eta^2 L r) / (1 - r)
        M_1   = 1 + kappa - 2 eta L - 4 (beta + eta^2 L) (1 - kappa)^2 L^2 eta a > 0
        bound = 2 (F_0 - F* + beta ||grad F_0||^2) / (M_1 eta T)
                + 2 (beta + eta^2 L) kappa^2 (a' sigma_SGD^2 / B + d s^2) / (M_1 eta),    a' = 2 + |1 + gamma|

    Corrected here:

    - The printed condition on eta leaves out the term of eta^2 L, and does not imply M_1 > 0: at kappa = 0.6,
      gamma = -1, L = 1 and eta = 0.6 it holds (eta < 0.628) and M_1 = -0.20. M_1 > 0 itself is required.
    - The least clip norm is printed as ``(1 + 2 (1 - kappa) / kappa) G``. A combination is as long as
      ``(|w| + |1 - w|) G``, ``w = (1 - kappa) / (kappa gamma)``: at kappa = 0.4 and gamma = 0.5 that is 5 G, not 4 G.

    The theorem starts its average at 0; `dpcore.methods.disk` starts it at g_0.

    References
    ----------
    DiSK (Zhang et al.), theorem 2 and appendix B.2.
    """
    k, g, eta = fraction(kappa=kappa), number(gamma=gamma), positive(learning_rate=learning_rate)
    T, L, gap = integer(1, steps=steps), positive(smoothness=smoothness), non_negative(initial_gap=initial_gap)
    power, noise = non_negative(initial_gradient=initial_gradient) ** 2, non_negative(noise_power=noise_power)
    noise += (2 + abs(1 + g)) * non_negative(gradient_variance=gradient_variance) / positive(batch_size=batch_size)
    if g == 0:
        raise ArgumentError("gamma=0: must not be 0, where the second gradient is taken at the same point")
    off = abs(1 + g)
    M_g = 1 + 4 * (2 + 1 / k + off) / g**2
    kept = (1 - k) ** 2
    r = kept * (1 + 4 * (eta * L) ** 2 + off * (k + 2 * (eta * L) ** 2 * M_g))
    if r >= 1:
        raise ArgumentError(
            f"kappa={kappa!r}: is too small for learning_rate={learning_rate!r} and gamma={gamma!r}: the theorem's "
            f"error term would grow by a factor of {r:.4g} each step; raise kappa, lower the rate, or take gamma=-1"
        )
    beta = (eta * (1 - k) / 2 + eta**2 * L * r) / (1 - r)
    error = beta + eta**2 * L
    descent = 1 + k - 2 * eta * L - 4 * error * kept * L**2 * eta * (2 + off * M_g)
    if descent <= 0:
        raise ArgumentError(
            f"learning_rate={learning_rate!r}: is too large for the theorem, whose M_1 is {descent:.4g} there and must "
            "be greater than 0"
        )
    bound = 2 * (gap + beta * power) / (descent * eta * T) + 2 * error * k**2 * noise / (descent * eta)
    w = (1 - k) / (k * g)
    return DiskConvergence(bound, abs(w) + abs(1 - w), beta, descent)


class DiskSettings(NamedTuple):
    """The settings of DiSK's corollary 1, the `bound` that it prints, and the least T and B that it asks for."""

    learning_rate: float
    kappa: float
    gamma: float
    bound: float
    least_steps: float
    least_batch_size: float


def disk_settings(
    steps: int,
    *,
    smoothness: float,
    initial_gap: float,
    initial_gradient: float,
    noise_power: float,
    gradient_variance: float = 0.0,
) -> DiskSettings:
    """Return the learning rate and kappa that DiSK's corollary 1 prescribes, with gamma = -1, and what it promises.

    Parameters
    ----------
    steps : int
        T.
    smoothness, initial_gap, initial_gradient, noise_power, gradient_variance
        See `disk_convergence`; the gap and the gradient greater than 0.

    Raises
    ------
    ArgumentError
        If ``||grad F(x_0)||^2 > 2 L (F(x_0) - F*)``, which no L-smooth loss allows.

    Notes
    -----
    With ``M = ||grad F_0||^2 / (2 L (F_0 - F*))``: eta is the lesser of ``1 / (L (2 + 4/M - M))`` and
    ``sqrt((2 M L (F_0 - F*) + ||grad F_0||^2) / (2 T d s^2)) / (M L)``, ``kappa = M L eta``, and the bound
    ``8 sqrt(M L (F_0 - F*) d s^2 / T)``.

    The printed least T does not suffice for the printed bound to follow: at L = F_0 - F* = d s^2 = 1, M = 0.05 and
    the least T, theorem 2 gives 303 times as much (`disk_convergence` at these settings says what it gives). As T grows
    theorem 2 gives 2.83 in place of the 8, and 3.54 at the least B.

    References
    ----------
    DiSK (Zhang et al.), corollary 1.
    """
    T, L, gap = integer(1, steps=steps), positive(smoothness=smoothness), positive(initial_gap=initial_gap)
    power, noise = positive(initial_gradient=initial_gradient) ** 2, positive(noise_power=noise_power)
    variance = non_negative(gradient_variance=gradient_variance)
    M = _relative_gradient(L, gap, initial_gradient)
    eta = min(1 / (L * (2 + 4 / M - M)), math.sqrt((2 * M * L * gap + power) / (2 * T * noise)) / (M * L))
    least = (2 * L * gap * (16 / M**3 + 16 / M**2 - 4 / M - 4) + power) / noise
    bound = 8 * math.sqrt(M * L * gap * noise / T)
    return DiskSettings(eta, M * L * eta, -1.0, bound, least, max(1.0, 2 * variance / noise))


def _relative_gradient(L: float, gap: float, initial_gradient: float) -> float:
    M = positive(initial_gradient=initial_gradient) ** 2 / (2 * L * gap)
    if M > 1 + 1e-12:
        raise ArgumentError(
            f"initial_gradient={initial_gradient!r}: must be at most {math.sqrt(2 * L * gap):.6g}, the root of "
            "2 * smoothness * initial_gap, as for every smooth loss"
        )
    return min(M, 1.0)


class Tradeoff(NamedTuple):
    """`bound` on the mean of ||grad F(x_t)||^2 under privacy, and the learning rate times the steps that reach it.

    `rate_times_steps` is None where the theorem prescribes none.
    """

    bound: float
    rate_times_steps: float | None = None


def disk_tradeoff(
    dataset_size: int,
    dimension: int,
    epsilon: float,
    delta: float,
    *,
    max_grad_norm: float,
    smoothness: float,
    initial_gap: float,
    initial_gradient: float,
) -> Tradeoff:
    """Return the privacy-utility bound of DiSK's theorem 3, ``4 C sqrt(2 M L (F_0 - F*) d ln(1/delta)) / (N epsilon)``.

    Parameters
    ----------
    dataset_size, dimension : int
        N and d.
    epsilon, delta : float
        The guarantee.
    max_grad_norm : float
        C.
    smoothness, initial_gap, initial_gradient : float
        See `disk_convergence`.

    Notes
    -----
    It is corollary 1's bound with ``s^2 = v C^2 T ln(1/delta) / (N epsilon)^2`` and v = 1/2. The moments accountant's
    v is an absolute constant that the paper does not state (its theorem 1), so the number shows how the bound scales,
    and not what a calibrated run reaches. T cancels in it: the printed
    ``T = sqrt(2) N epsilon / (C sqrt(d ln(1/delta)))`` has the unit of 1/C, and any T that is large enough will do.

    References
    ----------
    DiSK (Zhang et al.), theorem 3.
    """
    scale = _private_noise(dataset_size, dimension, epsilon, delta, max_grad_norm)
    L, gap = positive(smoothness=smoothness), positive(initial_gap=initial_gap)
    M = _relative_gradient(L, gap, initial_gradient)
    return Tradeoff(4 * math.sqrt(2 * M * L * gap) * scale)


def _private_noise(dataset_size: int, dimension: int, epsilon: float, delta: float, max_grad_norm: float) -> float:
    """Return ``C sqrt(d ln(1/delta)) / (N epsilon)``: by the moments accountant about ``sqrt(d s^2 / T)``."""
    N, d = integer(1, dataset_size=dataset_size), integer(1, dimension=dimension)
    spread = math.sqrt(d * math.log(1 / open_unit(delta=delta)))
    return positive(max_grad_norm=max_grad_norm) * spread / (N * positive(epsilon=epsilon))


class DopplerConvergence(NamedTuple):
    """What theorem 2 of DOPPLER promises: `bound` on ||grad F||^2 at a random step, if eta <= `largest_rate`.

    `signal` is S_T and `snr` the normalized SNR.
    """

    bound: float
    largest_rate: float
    signal: float
    snr: float


def doppler_convergence(
    impulse_response: ArrayLike,
    autocorrelation: ArrayLike,
    learning_rate: float,
    *,
    smoothness: float,
    initial_gap: float,
    noise_power: float,
    gradient_variance: float = 0.0,
    batch_size: float = 1.0,
    backward: ArrayLike = 0.5,
) -> DopplerConvergence:
    """Return the bound of DOPPLER's theorem 2 under SGD, for gradients that are not clipped.

    Parameters
    ----------
    impulse_response, autocorrelation : array of float, shape (T,)
        kappa_0..kappa_{T-1} of the filter (`dpcore.analysis.filters.impulse_response`) and c_0..c_{T-1} of the
        gradient: 1/2, then the share of assumption A4. T is the number of steps.
    learning_rate : float
        eta.
    smoothness, initial_gap, noise_power, gradient_variance, batch_size : float
        See `disk_convergence`.
    backward : float or array of float, shape (T,)
        c_{-tau} >= 0 of A4; 1/2 as in the paper's estimate.

    Raises
    ------
    ArgumentError
        If a kappa is negative (the proof multiplies A4, an inequality, by each of them), if S_T <= 0, if `backward` has
        another shape or sign, or if the learning rate is greater than ``min 2 c_{-tau} / (L kappa_tau)``.

    Notes
    -----
    ``S_T = sum_{t<T} sum_{tau<=t} c_tau kappa_tau``; step t is drawn with probability proportional to its part of
    S_T; ``bound = (F_0 - F*) / (eta S_T) + eta L (d s^2 + sigma_SGD^2 / B) / (2 SNR)``. It is of the recurrence before
    the division by its normalizers.

    References
    ----------
    DOPPLER (Zhang et al.), theorem 2, assumption A4 and equation 4.
    """
    ratio = snr(autocorrelation, impulse_response)
    c, kappa = np.asarray(autocorrelation, dtype=np.float64), np.asarray(impulse_response, dtype=np.float64)
    eta, L = positive(learning_rate=learning_rate), positive(smoothness=smoothness)
    gap = non_negative(initial_gap=initial_gap)
    noise = non_negative(noise_power=noise_power)
    noise += non_negative(gradient_variance=gradient_variance) / positive(batch_size=batch_size)
    if (kappa < 0).any():
        raise ArgumentError(
            f"impulse_response: is negative at lag {int(np.argmax(kappa < 0))}; the theorem covers filters whose "
            "impulse response is nowhere negative"
        )
    signal = float(np.arange(len(c), 0, -1) @ (c * kappa))
    if not signal > 0:
        raise ArgumentError("autocorrelation: the filter's output does not point along the gradient: S_T must be > 0")
    back = np.asarray(backward, dtype=np.float64)
    if back.shape not in ((), c.shape) or not (back >= 0).all():
        raise ArgumentError(f"backward: must be one number or {len(c)}, a number a lag, each 0 or greater")
    back = np.broadcast_to(back, c.shape)
    largest = float((2 * back[kappa > 0] / (L * kappa[kappa > 0])).min())
    if eta > largest:
        raise ArgumentError(f"learning_rate={learning_rate!r}: must be at most {largest:.6g}, the theorem's limit")
    return DopplerConvergence(gap / (eta * signal) + eta * L * noise / (2 * ratio), largest, signal, ratio)


def doppler_tradeoff(
    dataset_size: int,
    dimension: int,
    epsilon: float,
    delta: float,
    *,
    max_grad_norm: float,
    smoothness: float,
    initial_gap: float,
    snr: float,
    signal_per_step: float,
) -> Tradeoff:
    """Return the privacy-utility bound of DOPPLER's theorem 3 with its constant.

    Parameters
    ----------
    dataset_size, dimension, epsilon, delta, max_grad_norm, smoothness, initial_gap
        See `disk_tradeoff`.
    snr, signal_per_step : float
        The normalized SNR, and ``S_T / T``, both greater than 0: 1/2 and 1/2 without a filter.

    Notes
    -----
    The paper gives orders. With its ``s^2 = C^2 T ln(1/delta) / (N epsilon)^2`` the bound of theorem 2 depends on eta T
    alone, ``gap / (q eta T) + eta T L E^2 / (2 SNR)`` with q = S_T / T and ``E = C sqrt(d ln(1/delta)) / (N epsilon)``.
    It is least at ``eta T = sqrt(2 SNR gap / (q L)) / E``, and there ``E sqrt(2 L gap / (q SNR))``: the paper's order,
    and also the filter's q, which the paper takes for a constant. As for `disk_tradeoff`, s is without the moments
    accountant's constant: this shows how the bound scales, and is no calibration.

    References
    ----------
    DOPPLER (Zhang et al.), theorem 3.
    """
    scale = _private_noise(dataset_size, dimension, epsilon, delta, max_grad_norm)
    L, gap = positive(smoothness=smoothness), positive(initial_gap=initial_gap)
    ratio, q = positive(snr=snr), positive(signal_per_step=signal_per_step)
    return Tradeoff(scale * math.sqrt(2 * L * gap / (q * ratio)), math.sqrt(2 * ratio * gap / (q * L)) / scale)


def pmlf_largest_rate(
    window: int, *, smoothness: float, gradient_variance: float, max_grad_norm: float, noise_power: float
) -> float:
    """Return DP-PMLF's bound on the learning rate, ``sqrt(sigma_SGD^2 / (L^2 k^3 (C^2 + d s^2)))``.

    Parameters
    ----------
    window : int
        k.
    smoothness, gradient_variance, noise_power : float
        See `disk_convergence`; L greater than 0.
    max_grad_norm : float
        C.

    Notes
    -----
    Below it the gradients at the window's earlier points differ from the present one by no more than examples do from
    each other. The convergence bound itself is printed as an order, without constants.

    References
    ----------
    DP-PMLF (Xu et al.), lemma "Bounded Momentum Variance" and the convergence bound.
    """
    k, L = integer(1, window=window), positive(smoothness=smoothness)
    moved = positive(max_grad_norm=max_grad_norm) ** 2 + non_negative(noise_power=noise_power)
    return math.sqrt(non_negative(gradient_variance=gradient_variance) / (k**3 * moved)) / L


def accelerated_srgd_excess_risk(
    batch_size: float,
    steps: int,
    beta: float,
    *,
    lipschitz: float,
    smoothness: float,
    diameter: float,
    deviation: float | None,
    noise_norm: float,
) -> float:
    """Return theorem 4.7's bound on F(y_T) - F* of Accelerated-DP-SRGD with ``eta_t = t + 1``, or theorem 4.11's.

    Parameters
    ----------
    batch_size, steps, beta
        B, T and beta, as `accelerated_srgd_parameters` returns them; beta at least `smoothness`.
    lipschitz, smoothness, diameter : float
        See `accelerated_srgd_parameters`.
    deviation : float or None
        Q: no example's ``eta_t grad(x_t) - eta_{t-1} grad(x_{t-1})`` is farther from the mean. Twice the clip norm of
        the differences always is. None for variant "independent", which takes each batch's own gradient.
    noise_norm : float
        A bound on ||b_t||, the norm of the noise in the prefix sum of averages over beta.

    Notes
    -----
    With ``eta_{0:t} = (t + 1)(t + 2) / 2``::

        (1 / eta_{0:T}) (beta diam^2 + sum_{t<T} [
            eta_{0:t} (2 Q sqrt(t+1) (L + Q (t+1) / (sqrt(B) eta_t)) / (sqrt(B) eta_t beta)
                       + (3 Q sqrt(t+1) / (sqrt(B) eta_t) + L) ||b|| / eta_t + beta ||b||^2 / eta_t^2)
            + Q diam sqrt(t+1) / sqrt(B) + 3 beta ||b|| diam ])

    and for independent gradients, whose errors have expectation 0 given x_t::

        (1 / eta_{0:T}) (beta diam^2 + sum_{t<T} [
            eta_{0:t} (8 L^2 / (sqrt(B) beta) + 5 L ||b|| / eta_t + beta ||b||^2 / eta_t^2) + 3 beta ||b|| diam ])

    The paper prints the last term within the factor eta_{0:t}. Its equation 12, from which both theorems follow, has it
    outside.

    References
    ----------
    DP-SRG (Choquette-Choo, Ganesh, Thakurta), theorems 4.7 and 4.11.
    """
    B, T = positive(batch_size=batch_size), integer(1, steps=steps)
    L, M, diam = positive(lipschitz=lipschitz), positive(smoothness=smoothness), positive(diameter=diameter)
    b, beta = non_negative(noise_norm=noise_norm), positive(beta=beta)
    if beta < M:
        raise ArgumentError(f"beta={beta!r}: must be at least smoothness={smoothness!r}, as the theorem requires")
    eta = np.arange(1, T + 1, dtype=np.float64)  # eta_t, which is t + 1
    prefix = eta * (eta + 1) / 2
    if deviation is None:
        weighted = 8 * L**2 / (math.sqrt(B) * beta) + 5 * L * b / eta
        sampled = np.zeros(T)
    else:
        Q = non_negative(deviation=deviation)
        spread = Q / np.sqrt(B * eta)  # Q sqrt(t + 1) / (sqrt(B) eta_t)
        weighted = 2 * spread * (L + Q / math.sqrt(B)) / beta + (3 * spread + L) * b / eta
        sampled = Q * diam * np.sqrt(eta / B)
    terms = prefix * (weighted + beta * (b / eta) ** 2) + sampled + 3 * beta * b * diam
    return float((beta * diam**2 + terms.sum()) / ((T + 1) * (T + 2) / 2))
