"""The plan of a private run, from the arguments of `make_private`, and its parts, joined once they fit together."""

from __future__ import annotations

from typing import Any

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.peers import Peers
from dpcore.mechanism.room import check_vectors
from dpcore.plan.plan import Plan
from dpcore.sampling import Sampler, is_sampler
from dpcore.sampling import sampler as make_sampler
from dpcore.spec import validate
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import Backend
from dpcore.stages.method import Method
from dpcore.torch.data.data import Data
from dpcore.torch.data.loader import PrivateLoader
from dpcore.torch.engine import Engine
from dpcore.torch.gradients.per_example import PerExampleGradient
from dpcore.torch.model.memory import free_memory
from dpcore.torch.optimizer import PrivateOptimizer
from dpcore.torch.parameter_views import Working


def sampler_of(method: Method, examples: int, sampling: str | Sampler, **options: int | None) -> Sampler:
    """Return the sampler for so many examples, given by name with its options, or as an object."""
    if isinstance(sampling, str):
        if method.batch_size is None:
            raise ArgumentError("batch_size=None: give the method its expected batch size, as in disk(batch_size=256)")
        return make_sampler(sampling, dataset_size=examples, batch_size=method.batch_size, **options)
    for option, value in options.items():
        if value is not None:
            raise ArgumentError(f"{option}={value!r}: is only for a sampling by name; the sampler has its own")
    if not is_sampler(sampling):
        raise ArgumentTypeError(
            f"sampling={sampling!r}: must be a name, such as 'poisson', or a sampler of dpcore.sampling, such as "
            "PoissonSampler(dataset_size=..., batch_size=...); what torch's samplers draw is not accounted"
        )
    if sampling.example_count != examples:
        told = f"dataset_size={sampling.example_count}: must be"
        if sampling.unit_of_privacy != "example":
            told = f"user_of_example of length {sampling.example_count}: must name the user of each of the"
        raise ArgumentError(f"sampling.{told} {examples}, the number of examples of the data")
    return sampling


def plan_of(method: Method, sampler: Sampler, epochs: int | None, steps: int | None, names: tuple[str, ...]) -> Plan:
    """Return the plan of so many epochs or steps; the noise multiplier may still be missing."""
    if (epochs is None) == (steps is None):
        raise ArgumentError(f"epochs={epochs!r}, steps={steps!r}: give exactly one of them")
    if steps is None:
        steps = validate.integer(minimum=1, epochs=epochs) * sampler.steps_per_epoch
    return Plan(method, sampler, validate.integer(minimum=1, steps=steps), names)


def with_noise(plan: Plan, target_epsilon: float | None, target_delta: float | None, accountant: str | None) -> Plan:
    """Return the plan with a noise multiplier: the method's, or what is calibrated to the target."""
    if target_delta is not None:
        validate.open_unit(target_delta=target_delta)
    given = plan.method.noise.noise_multiplier
    if target_epsilon is None:
        if given is None:
            raise ArgumentError(
                "noise_multiplier=None: give the method one, or target_epsilon and target_delta to have it calibrated"
            )
        plan.check_covered(accountant)
        return plan
    validate.positive(target_epsilon=target_epsilon)
    if given is not None:
        raise ArgumentError(
            f"target_epsilon={target_epsilon!r}: the method already has noise_multiplier={given!r}; give one of them"
        )
    if target_delta is None:
        raise ArgumentError("target_delta=None: must be given with target_epsilon, for example 1e-5")
    return plan.calibrated(target_epsilon, target_delta, accountant=accountant)


def layout_of(working: Working) -> Layout:
    """Return where each trained tensor's elements lie in the random stream."""
    return Layout.of((name, p.shape) for name, p in zip(working.names, working.parameters, strict=True))


def assembled(
    gradient: PerExampleGradient,
    working: Working,
    source: Data,
    plan: Plan,
    keys: RunKeys,
    *,
    backend: Backend[Any],
    peers: Peers,
    params: Any = None,
    microbatch_size: int = 1,
) -> tuple[Engine, PrivateLoader, PrivateOptimizer]:
    """Return a run's engine, with a mechanism of these keys, the loader of its batches, and its optimizer."""
    layout, parameters = layout_of(working), working.arrays()
    device = working.parameters[0].device
    if device.type == "cuda":  # the mechanism asks the machine itself, and knows no devices
        check_vectors(plan, layout, parameters, peers, *free_memory(device))
    mechanism = Mechanism(plan, layout, parameters, backend=backend, keys=keys, peers=peers)
    loader = PrivateLoader(source, mechanism)
    engine = Engine(gradient, mechanism, working, microbatch_size)
    engine.views = source.views
    return engine, loader, PrivateOptimizer(list(working.parameters) if params is None else params, engine, loader)
