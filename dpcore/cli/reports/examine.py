"""``dpcore doctor`` and ``dpcore audit``: checks of a run before it trains, and canaries through the real step."""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn
from unittest.mock import patch

import typer

from dpcore.cli.accounting.answer import ACCOUNTED, EventOptions
from dpcore.cli.options import Json, count, flag, one_of, option, real, takes
from dpcore.cli.output import write_answer
from dpcore.cli.train.settings import SETTINGS, Settings, settings_from
from dpcore.errors import ArgumentError, DataError, DpcoreError
from dpcore.plan.plan import Plan

_NAMES = ("model", "data", "method", "loss")


class _Reached(BaseException):
    """`make_private` was called with these arguments. The script's ``except Exception`` does not catch it."""


@contextmanager
def own_run(place: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the keywords of the run of a script, or of the result of ``FILE.py:FUNCTION``.

    `arguments` follow the script's name in its ``sys.argv``. ArgumentError if the script fails, or gives no run.
    """
    name, _, function = place.partition(":")
    path = Path(name)
    if path.suffix != ".py":
        raise ArgumentError(f"{place!r}: must be a file that ends in .py, or FILE.py:FUNCTION")
    if not path.is_file():
        raise DataError(f"{name}: there is no such file")
    folder, main = str(path.resolve().parent), sys.modules["__main__"]
    try:
        with patch.object(sys, "argv", [name, *arguments]), patch.object(sys, "path", [folder, *sys.path]):
            with redirect_stdout(sys.stderr):  # standard output is for the findings
                keywords = _objects(place, path, function)
            yield keywords
    finally:
        sys.modules["__main__"] = main


def _objects(place: str, path: Path, function: str) -> dict[str, Any]:
    try:
        with _stopping():
            module = ModuleType(path.stem if function else "__main__")
            module.__file__ = str(path)
            sys.modules[module.__name__] = module
            exec(compile(path.read_bytes(), str(path), "exec"), vars(module))  # noqa: S102 - the user's own file
            if function:
                if not callable(getattr(module, function, None)):
                    raise ArgumentError(f"{place}: has no function {function!r}")
                objects = getattr(module, function)()
                if isinstance(objects, (tuple, list)) and 2 <= len(objects) <= len(_NAMES):
                    return dict(zip(_NAMES, objects, strict=False))
                if isinstance(objects, Mapping) and {"model", "data"} <= objects.keys():
                    return {str(key): value for key, value in objects.items()}
                raise ArgumentError(
                    f"{place}: must return (model, data, method, loss), or a dict with 'model', 'data' and other "
                    f"keywords of make_private, not {type(objects).__name__}"
                )
    except _Reached as reached:
        return dict(reached.args[0])
    except DpcoreError:
        raise
    except (Exception, SystemExit) as cause:
        problem = f"{place}: ends with {type(cause).__name__} ({cause}) before it gives a run"
        raise ArgumentError(f"{problem}; --debug shows where") from cause
    raise ArgumentError(f"{place}: never calls dpcore.torch.make_private; name a function that returns the objects")


@contextmanager
def _stopping() -> Iterator[None]:
    """Let `make_private` stop the script, and pass on its arguments."""
    import dpcore.torch

    place = sys.modules["dpcore.torch.make_private"]
    signature = inspect.signature(place.make_private)

    def stop(*args: Any, **kwargs: Any) -> NoReturn:
        raise _Reached(dict(signature.bind(*args, **kwargs).arguments))

    stop.__signature__ = signature  # type: ignore[attr-defined]
    with patch.object(dpcore.torch, "make_private", stop), patch.object(place, "make_private", stop):
        yield


_WORDS = "A script that calls make_private, or a function that returns model, data, method and loss"
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", show_default=False,
    help="The script's arguments in sys.argv; after -- if they begin with a dash.")]  # fmt: skip
Confidence = Annotated[float, option(real, "P", "1 minus the probability of a false alarm of the audit.")]
Seconds = Annotated[float, option(real, "SECONDS", "Longest time, about, for the audit of a run of your own.")]


def doctor(
    place: Annotated[str, typer.Argument(metavar="FILE[:FUNCTION]", help=f"{_WORDS}.")],
    arguments: Arguments = None,
    no_audit: Annotated[bool, flag("--no-audit", "Skip the audit, which takes most of the time.")] = False,
    confidence: Confidence = 0.99,
    seconds: Seconds = 60.0,
    as_json: Json = False,
) -> int:
    """Examine a model, its data, a loss and a method before they train; status 1 if there is a fault."""
    from dpcore.torch import doctor as examined

    with own_run(place, arguments or ()) as run:
        findings = examined(**run, audit=not no_audit, confidence=confidence, seconds=seconds)
    write_answer(as_json, findings.to_dict(), str(findings))
    return 0 if findings.ok else 1


_OF_AUDIT = ("method", "base", "variant", "strategy", "bands", "max_grad_norm", "clipping", "clipping_groups", "delta")


@takes(Settings, without=[name for name in SETTINGS if name not in _OF_AUDIT])
def audit(
    place: Annotated[str | None, typer.Argument(metavar="FILE[:FUNCTION]", show_default=False,
        help=f"{_WORDS}: canaries then go through this run's own step, and of the options only --confidence, --seconds "
        "and --json count.")] = None,
    arguments: Arguments = None,
    noise_multiplier: Annotated[float | None, option(real, "SIGMA",
        "Noise multiplier of the audited run; 2 without it and --epsilon.")] = None,
    epsilon: Annotated[float | None, option(real, "EPSILON", "Calibrate the noise to this claim instead.")] = None,
    sampling: Annotated[str | None, option(one_of(ACCOUNTED), "NAME",
        ", ".join(ACCOUNTED) + "; if not given: fixed-order if the method needs it, else poisson.")] = None,
    dataset_size: Annotated[int, option(count, "N", "Number of examples.")] = 400,
    batch_size: Annotated[int, option(count, "N", "Expected batch size.")] = 40,
    steps: Annotated[int, option(count, "N", "Number of steps of a run.")] = 10,
    max_batch_size: Annotated[int | None, option(count, "N", "Limit of truncated-poisson.")] = None,
    groups: Annotated[int | None, option(count, "N", "For cyclic-poisson: groups that take turns.")] = None,
    canaries: Annotated[int, option(count, "N", "Canaries in each run, at most --dataset-size.")] = 128,
    runs: Annotated[int, option(count, "N", "Number of runs, each with fresh keys.")] = 32,
    confidence: Confidence = 0.99,
    seconds: Seconds = 60.0,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Try to refute a method's claimed epsilon; the exit status is 1 if that succeeds."""
    from dpcore.audit import audit as audited

    if place is not None:
        with own_run(place, arguments or []) as run:
            from dpcore.torch import audit as audit_run

            result = audit_run(**run, confidence=confidence, seconds=seconds)
        write_answer(as_json, result.to_dict(), str(result))
        return 1 if result.flagged else 0
    if epsilon is None and noise_multiplier is None:
        noise_multiplier = 2.0
    settings = settings_from({**given, "epsilon": epsilon, "noise_multiplier": noise_multiplier})
    drawn = sampling or settings.sampling or "poisson"
    if drawn == "full-batch":
        drawn, batch_size = "fixed-order", dataset_size
    sampler: Any = EventOptions(
        sampling=drawn, dataset_size=dataset_size, batch_size=batch_size, max_batch_size=max_batch_size, groups=groups
    ).sampler()
    # It divides by the sampler's batch size: under full batches, by the data set's size.
    chosen = settings.build_method()
    if epsilon is not None:
        chosen = Plan(chosen, sampler, steps).calibrated(epsilon, settings.delta).method
    result = audited(chosen, sampler, steps, delta=settings.delta, canaries=canaries, runs=runs, confidence=confidence)
    content = {**result.to_dict(), "sampler": sampler.describe(), "settings": chosen.describe()}
    write_answer(as_json, content, str(result))
    return 1 if result.flagged else 0
