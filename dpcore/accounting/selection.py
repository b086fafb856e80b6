r"""Private selection: the best of a random number of runs, and what its release costs.

K runs of one private mechanism are made, K drawn from a public law; the one best by a total order of the results is
released, and nothing else. Let F(x) = E x^K be the law's generating function, P and Q the law of one result on either
of two neighbouring data sets, and p(y), q(y) the probabilities of a result worse than y (ties are broken by a coin of
the run's own, a part of y, so the order has none). The winner has density F'(p) dP on one data set and F'(q) dQ on the
other, and with probability F(0) nothing is released. F' rises. m = F'(1) = E K. Write s = 1 - p and t = 1 - q: the
probabilities of one set, the results from y on.

**Truncated negative binomial**, shape h > -1 and 0 < g < 1 (h = 1 is geometric, h = 0 logarithmic, K >= 1):

    F(x) = ((1 - (1-g) x)^(-h) - 1) / (g^(-h) - 1),    F'(p) = m (g / a)^(h+1),   a = g + (1-g) s,   b = g + (1-g) t.

*Moments* (Papernot and Steinke, Theorem 2). F'(p)^o F'(q)^(1-o) = F'(p) (F'(p) / F'(q))^(o-1) <= m (b/a)^((h+1)(o-1)).
b and a are the probabilities of one event under Q and P, with a coin of probability g beside it, so with the divergence
R(u) of order u, b^u a^(1-u) <= e^((u-1) R(u)), hence b/a <= e^((1-1/u) R(u)) a^(-1/u) and a >= g. So, at every u >= 1,

    R'(o) <= R(o) + (1+h) ((1 - 1/u) R(u) + log(1/g) / u) + log(m) / (o - 1).

*Profile.* For every c >= 0, t <= e^c s + D(c) with D(c) the mechanism's delta at epsilon c. If
(1-g) D(c) <= g (e^c - 1), then b <= e^c a. The least such c is, by the duality of profile and trade-off function, the
largest log(b/a) that any test allows. With it F'(q) >= e^(-(h+1) c) F'(p), and the delta at epsilon e is

    int (F'(p) dP - e^e F'(q) dQ)_+ <= int F'(p) (dP - e^(e - (h+1)c) dQ)_+.

Let d = D(e - (h+1)c). The measure (dP - ...)_+ is at most d in all, and at most P of any set: on {p > x}, at most
min(d, 1 - x). With F'(p) = F'(0) + int_0^p F'' the integral is at most F'(0) d + int F''(x) min(d, 1-x) dx
= 1 - F(1-d), by parts: the probability that one of K runs meets an event of probability d. It is at most m d.

**Poisson**, mean m: F(x) = e^(m (x-1)). *Moments* (Theorem 6): F'(p)^o F'(q)^(1-o) = m e^(m ((o-1) t - o s)), and
t <= e^c s + D(c) at e^c = o/(o-1) leaves m e^(m (o-1) D(c)). Nothing released (K = 0) adds e^(-m) to the moment:

    e^((o-1) R'(o)) <= e^(-m) + m e^((o-1) (R(o) + m D(c))).

*Profile*: F'(p) / F'(q) = e^(m (t - s)) <= e^(m D(0)), so (h+1) c above may be m D(0). Better, t - s <= G(x) =
min_c ((e^c - 1) x + D(c)) wherever s <= x. There the measure N = (dP - e^e F'(q) / F'(p) dQ)_+ is at most M(x) =
min(x, D(e - m G(x))) in all. F'(p) = m e^(-ms) falls with s, so int F'(p) dN is at most what it is if N has all of M(x)
on every such set, by parts

    m e^(-m) M(1) + int_0^1 m^2 e^(-ms) M(s) ds.

Between two points of a grid M is at most its value at the upper one, since G and M rise. D is convex in e^epsilon, so
below the chords between its upper bounds. K = 0 has the same probability on both data sets and adds (1 - e^e)_+ = 0.

D and R bound both directions, so the results do. A run that fails has the worst result; it is one of K all the same.

References
----------
Liu and Talwar, "Private Selection from Private Candidates", 2019.
Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential Privacy", 2022, Theorems 2 and 6.
Koskela, Redberg and Wang, "Privacy Profiles for Private Selection", 2024 (a bound m D(e - (h+1) c)).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting.events import Event, PrivateSelection
from dpcore.accounting.phases import parts_of, phases
from dpcore.accounting.pld import curve, delta_interval, epsilon_interval
from dpcore.accounting.run_law import any_of, continuation, each_of

_UP: Final = 1.0 + 1e-12  # more than the rounding of the few float64 operations around each certified bound
_CELLS = 32
_KNOTS, _CUTS, _MOST = 64, 256, 300.0  # a larger epsilon is left as it is

Array = NDArray[np.float64]


def distortion(event: PrivateSelection) -> float:
    """Return an upper bound on log(F'(p) / F'(q)): (h+1) c, or m D(0) under a Poisson law."""
    if event.shape is None:
        return event.expected_runs * delta_interval(event.run, 0.0).upper * _UP
    return (1.0 + event.shape) * _largest_ratio(event.run, continuation(event.shape, event.expected_runs)) * _UP


@lru_cache(maxsize=256)
def _largest_ratio(run: Event, g: float) -> float:
    """Return the least c of a grid with (1-g) D(c) <= g (e^c - 1), which is log(1/g) at most, where D(c) <= 1 does."""
    low, high = 0.0, -math.log(g)
    for _ in range(3):
        cells = np.linspace(low, high, _CELLS + 1)
        upper = curve(run, cells[:-1])[1]
        meets = np.append((1.0 - g) * upper * _UP <= g * np.expm1(cells[:-1]), True)
        first = int(np.argmax(meets))
        if first == 0:
            return low
        low, high = float(cells[first - 1]), float(cells[first])
    return high


@lru_cache(maxsize=64)
def _knots(run: Event, last: float) -> tuple[Array, Array]:
    """Return e^epsilon at epsilons from 0 to the last one, and upper bounds on the run's delta there."""
    epsilons = np.linspace(0.0, last, _KNOTS)
    return np.exp(epsilons), np.minimum(1.0, curve(run, epsilons)[1] * _UP)


def _poisson_delta(event: PrivateSelection, epsilon: float, knots: Array, profile: Array) -> float:
    """Return the bound by M, from the run's profile at some knots."""
    mean, x = event.expected_runs, np.append(0.0, np.geomspace(1e-9, 1.0, _CUTS))
    apart = np.min((knots[:, None] - 1.0) * x + profile[:, None], axis=0)
    left = epsilon - mean * apart * _UP
    lies = np.interp(np.exp(np.minimum(np.abs(left), _MOST)), knots, profile)
    most = np.minimum(x, np.where(left < 0.0, -np.expm1(left) + np.exp(left) * lies, lies))
    weight = mean * np.exp(-mean * x)
    falls = weight[:-1] * -np.expm1(-mean * np.diff(x))
    return float(weight[-1] * most[-1] + np.sum(most[1:] * falls)) * (1.0 + 1e-9)


def _poisson_epsilon(event: PrivateSelection, delta: float, coarse: float) -> float:
    """Return an epsilon, at most the coarse one, at which the bound by M is at most delta."""
    knots, low, high = _knots(event.run, coarse), 0.0, coarse
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _poisson_delta(event, middle, *knots) <= delta else (middle, high)
    return high


@dataclass(frozen=True)
class SelectionAccountant:
    """Accountant of one private selection, by the privacy profile of its run; the derivation is above.

    The run's profile is that of "pld". A selection together with other releases is for "rdp".
    """

    name = "selection"
    floor = "a selection costs at least the log ratio that its number of runs allows"

    def supports(self, event: Event) -> bool:
        """Whether the event is one selection, of runs that "pld" covers."""
        return (only := _only(event)) is not None and phases(only.run) is not None

    def epsilon(self, event: Event, delta: float) -> float:
        """Return (h+1) c and the run's epsilon at the d with 1 - F(1-d) = delta."""
        only = _demand(event)
        each = each_of(only.shape, only.expected_runs, delta) / _UP
        if each >= 1.0:
            return 0.0
        coarse = (distortion(only) + epsilon_interval(only.run, each).upper) * _UP
        return coarse if only.shape is not None or coarse > _MOST else _poisson_epsilon(only, delta, coarse)

    def delta(self, event: Event, epsilon: float) -> float:
        """Return 1 - F(1-d) at the run's delta d at epsilon - (h+1) c."""
        only = _demand(event)
        rest = epsilon - distortion(only)
        each = delta_interval(only.run, abs(rest)).upper
        # Below 0 by D(-e) = 1 - 1/e^e + D(e) / e^e.
        each = each if rest >= 0.0 else -math.expm1(rest) + math.exp(rest) * each
        coarse = min(1.0, any_of(only.shape, only.expected_runs, min(1.0, each * _UP)) * _UP)
        if only.shape is not None or epsilon > _MOST:
            return coarse
        return min(coarse, _poisson_delta(only, epsilon, *_knots(only.run, epsilon)))


def _only(event: Event) -> PrivateSelection | None:
    parts = [(part, count) for part, count in parts_of(event) if count]
    if len(parts) != 1 or parts[0][1] != 1 or not isinstance(parts[0][0], PrivateSelection):
        return None
    return parts[0][0]


def _demand(event: Event) -> PrivateSelection:
    only = _only(event)
    assert only is not None, "callers ask supports() first"
    return only
