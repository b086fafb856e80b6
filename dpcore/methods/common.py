"""The keywords that all named methods share, and the stages made of them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypedDict, get_args, get_type_hints

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.validate import choice
from dpcore.stages.clipping import AdaptiveClip, Clip
from dpcore.stages.filters import Filter, Identity, LowPass
from dpcore.stages.filters.designs import filter_of
from dpcore.stages.method import Method
from dpcore.stages.noise import CorrelatedGaussian, IndependentGaussian, Noise
from dpcore.stages.queries import Plain, Query
from dpcore.stages.strategies import NamedStrategy, from_matrix
from dpcore.stages.updates import SGD, AdaGrad, Adam, AdamW, Momentum, Nesterov, Update
from dpcore.stages.updates.averaging import Averaging
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import FIRST_LR, Schedule, is_adaptive

_UPDATES: Final[tuple[type, ...]] = (SGD, Momentum, Nesterov, Adam, AdamW, AdaGrad)
BASES: Final[dict[str, Callable[..., Update]]] = {kind.__name__.lower(): kind for kind in _UPDATES}

METHODS: Final[dict[str, Callable[..., Method]]] = {}
"""The methods by name; `dpcore.methods` fills it."""


class Shared(TypedDict, total=False):
    """Keywords of every method.

    Attributes
    ----------
    lr : float
        Learning rate; `dpcore.schedules.Doubling` needs none, and begins at 0.1.
    max_grad_norm : float
        Clip norm C, 1 by default.
    clipping : str
        Clip rule, see `dpcore.clipping.Clip`.
    clipping_groups : str or mapping of str to float
        "flat", "per_layer", "per_tensor", or clip norms by name pattern.
    adaptive_clip : AdaptiveClip or None
        Lets the clip norm follow a private quantile, from `max_grad_norm` on: `dpcore.clipping.AdaptiveClip`.
    noise_multiplier : float or None
        sigma; None to have it calibrated.
    batch_size : float or None
        Expected batch size; None takes the sampler's.
    strategy : str, array, NamedStrategy, Strategy or None
        Correlates the noise (`dpcore.strategies`); needs batches in a fixed or shuffled order, by random allocation
        or, if it is banded, by cyclic Poisson sampling. None is independent noise.
    schedule : Schedule
        Schedule of the learning rate, from `dpcore.schedules`.
    averaging : Averaging
        Average of the parameters over time, from `dpcore.averaging`.
    galore : GaLore
        Filter and update in subspaces, `dpcore.galore`.
    radius : float
        Radius of the ball around 0 that the parameters are projected onto.
    """

    lr: float | None
    max_grad_norm: float
    clipping: str
    clipping_groups: str | Mapping[str, float]
    adaptive_clip: AdaptiveClip | None
    noise_multiplier: float | None
    batch_size: float | None
    strategy: Any
    schedule: Schedule | None
    averaging: Averaging | None
    galore: GaLore | None
    radius: float | None


class Common(Shared, total=False):
    """Keywords of the methods that work on any base.

    Attributes
    ----------
    base : str or Update
        "sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", or an update from `dpcore.updates`.
    weight_decay, momentum, betas, eps
        Settings of a base that is given by name.
    """

    base: str | Update
    weight_decay: float
    momentum: float
    betas: tuple[float, float]
    eps: float


_SHARED: Final = tuple(Shared.__annotations__)
_UPDATE_SETTINGS: Final = tuple(name for name in Common.__annotations__ if name not in (*_SHARED, "base"))


def assemble(
    name: str,
    common: Mapping[str, Any],
    *,
    query: Query | None = None,
    filter: Filter | None = None,  # noqa: A002
    update: Update | None = None,
    base: str = "sgd",
    clipping: str = "standard",
    own: Sequence[str] = (),
) -> Method:
    """Join a method's own stages and the common keywords; `base` and `clipping` are its defaults.

    `own` are keywords of the method that its signature does not name: for messages.
    """
    for keyword in common:
        known = Common.__annotations__ if update is None else _SHARED
        if keyword not in known:
            of_method = [one for one in keywords(name) if one not in Common.__annotations__]
            choice(dict.fromkeys((*of_method, *own, *known)), **{f"keyword of {name}()": keyword})
    if update is None:
        settings = {k: v for k, v in common.items() if k not in (*_SHARED, "base")}
        lr, found = common.get("lr"), is_adaptive(common.get("schedule"))
        update = make_update(common.get("base", base), FIRST_LR if lr is None and found else lr, settings)
    return Method(
        name=name,
        update=update,
        query=query or Plain(),
        clip=Clip(
            common.get("max_grad_norm", 1.0),
            common.get("clipping", clipping),
            common.get("clipping_groups", "flat"),
            common.get("adaptive_clip"),
        ),
        noise=make_noise(common.get("noise_multiplier"), common.get("strategy")),
        filter=filter or Identity(),
        **{k: common.get(k) for k in ("batch_size", "schedule", "averaging", "galore", "radius")},
    )


@cache
def keywords(method: str, base: str | None = None) -> tuple[str, ...]:
    """Return the names of the keywords that a method takes, its own first.

    Parameters
    ----------
    method : str
        A name of `dpcore.methods.METHODS`.
    base : str, optional
        A name of `dpcore.methods.BASES`; of the settings of updates only those of this one are then named.
    """
    function = METHODS[method]
    parameters = inspect.signature(function).parameters.values()
    own = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    (rest,) = (p.name for p in parameters if p.kind is p.VAR_KEYWORD)
    (known,) = get_args(get_type_hints(function)[rest])
    others = set() if base is None else set(_UPDATE_SETTINGS).difference(inspect.signature(BASES[base]).parameters)
    return (*own, *(name for name in known.__annotations__ if name not in others))


def make_update(base: str | Update, lr: float | None, settings: Mapping[str, Any]) -> Update:
    """Return the base's update: made by name, with its settings, or given whole."""
    if not isinstance(base, str):
        _check_base(base)
        if lr is not None or settings:
            raise ArgumentError("base: an update has its own settings, so lr and the like must not be given with it")
        return base
    if lr is None:
        raise ArgumentError(f"lr=None: must be a learning rate for base={base!r}")
    make = BASES[choice(BASES, base=base)]
    fields = getattr(make, "__dataclass_fields__", ())
    known = [name for name in _UPDATE_SETTINGS if name in fields]
    for name in settings:
        others = [other for other, update in BASES.items() if name in getattr(update, "__dataclass_fields__", ())]
        if name not in known and others:
            raise ArgumentError(f"{name}={settings[name]!r} with base={base!r}: give base={others[0]!r}, which has it")
        choice(known, **{f"setting of base={base!r}": name})
    return make(lr=lr, **settings)


def _check_base(base: Any) -> None:
    """Refuse an object that is no update, such as torch's optimizer or a class."""
    if not isinstance(base, type) and all(hasattr(base, member) for member in ("rule", "settings", "prepared")):
        return
    kind = base if isinstance(base, type) else type(base)
    name = kind.__name__.lower()
    remedy = f"; give base={name!r}, and its settings as keywords, lr=..." if name in BASES else ""
    raise ArgumentTypeError(
        f"base={kind.__name__}: must be one of {', '.join(map(repr, BASES))}, or an update of dpcore.updates, such as "
        f"Adam(lr=0.001){remedy}"
    )


def make_noise(noise_multiplier: float | None, strategy: Any) -> Noise:
    """Return independent noise, or noise correlated by a strategy: an object, a matrix or a name."""
    if strategy is None:
        return IndependentGaussian(noise_multiplier)
    if isinstance(strategy, str):
        strategy = NamedStrategy(strategy)
    elif isinstance(strategy, (np.ndarray, list, tuple)):
        strategy = from_matrix(strategy)
    return CorrelatedGaussian(noise_multiplier, strategy)


def low_pass_of(
    filter: str | Filter | None,  # noqa: A002
    b: Sequence[float] | None,
    a: Sequence[float] | None,
    default: str,
) -> Filter:
    """Return a filter given by name, by coefficients, or whole; `default` is a name."""
    if filter is not None and (a is not None or b is not None):
        raise ArgumentError(f"filter={filter!r}: must not be given together with coefficients b and a")
    if b is None and a is not None:
        raise ArgumentError("b=None: must be given together with a")
    if b is not None:
        return LowPass(b=b, a=a or ())
    if filter is None:
        return filter_of(default)
    return filter_of(filter) if isinstance(filter, str) else filter


def learning_rate(method: str, common: Shared) -> float:
    """Return the learning rate, which a method with its own update must be given."""
    lr = common.get("lr")
    if lr is None:
        raise ArgumentError(f"lr=None: must be a learning rate for {method}")
    return lr
