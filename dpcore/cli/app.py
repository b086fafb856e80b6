"""The commands in one place, and the one place where exceptions become a sentence and an exit status."""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from dpcore.cli.interrupt import Stopped
from dpcore.cli.options import Commands, flag
from dpcore.cli.output import fitted
from dpcore.errors import DpcoreError
from dpcore.spec.extras import EXTRAS, needs
from dpcore.spec.validate import nearest
from dpcore.spec.version import __version__

# Place, words, example. A command is imported when it is used: the general help needs none of them.
# fmt: off
_COMMANDS = {
    "train": ("dpcore.cli.train.train:train", "Train a model with a stated privacy guarantee.",
        "dpcore train --data digits --model mlp --method disk --epsilon 3 --delta 1e-5 --epochs 10"),
    "compare": ("dpcore.cli.compare.compare:compare",
        "Compare methods on one data set at the same epsilon and delta, over several seeds.",
        "dpcore compare --methods dp_sgd,doppler,disk --epsilon 1,8 --lr 0.25,0.5,1 --epochs 5 --out comparison"),
    "tune": ("dpcore.cli.train.tune:tune",
        "Train with the best of randomly drawn settings, at one guarantee for the whole search.",
        "dpcore tune --method disk --space lr=0.05:5 --epsilon 3 --epochs 10 --ledger digits.ledger --public-test-set"),
    "methods": ("dpcore.cli.reports.verify:methods", "List the methods, each with the paper that it comes from.",
        "dpcore methods --json"),
    "epsilon": ("dpcore.cli.accounting.answer:epsilon", "Compute the epsilon of a noise multiplier.",
        "dpcore epsilon --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --delta 1e-6"),
    "delta": ("dpcore.cli.accounting.answer:delta", "Compute the delta of a plan at an epsilon.",
        "dpcore delta --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --epsilon 2"),
    "calibrate": ("dpcore.cli.accounting.answer:calibrate",
        "Find the noise, the steps, the batch size or the delta for a target epsilon, whichever is left out.",
        "dpcore calibrate --dataset-size 60000 --batch-size 256 --epochs 10 --epsilon 3 --delta 1e-5"),
    "curve": ("dpcore.cli.accounting.curve:curve",
        "Show a plan's guarantee: delta over epsilon, an attacker's rates, epsilon over the steps.",
        "dpcore curve steps --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --delta 1e-6"),
    "statement": ("dpcore.cli.reports.verify:statement",
        "Print a stored privacy statement in short. dpcore verify checks it.",
        "dpcore statement runs/digits-mlp-disk"),
    "verify": ("dpcore.cli.reports.verify:verify",
        "Derive a statement again from its settings, and compare the files next to it. Status 1 if a check fails.",
        "dpcore verify runs/digits-mlp-disk/statement.json"),
    "audit": ("dpcore.cli.reports.examine:audit",
        "Try to refute a method's claimed epsilon; the exit status is 1 if that succeeds.",
        "dpcore audit --method disk --sampling poisson --noise-multiplier 2 --canaries 128"),
    "doctor": ("dpcore.cli.reports.examine:doctor",
        "Examine a model, its data, a loss and a method before they train; status 1 if there is a fault.",
        "dpcore doctor train.py"),
    "demo": ("dpcore.cli.compare.compare:demo",
        "Compare DP-SGD, DOPPLER and DiSK on the built-in digits, at the same epsilon and delta.",
        "dpcore demo --out demo"),
    "inspect": ("dpcore.cli.reports.inspect:inspect", "Show a filter, or the gradients that a run released.",
        "dpcore inspect filter first-order-v1 --out filter.png"),
    "predict": ("dpcore.cli.reports.predict:predict",
        "Predict the loss of methods on a quadratic at their best learning rates, without data.",
        "dpcore predict --methods dp_sgd,doppler,disk --noise 0.3,3,30 --steps 500"),
    "reproduce": ("dpcore.cli.compare.reproduce:reproduce",
        "Run the papers' tables and figures again, and show their numbers next to those found.",
        "dpcore reproduce run pmlf-table-4-mnist --data-dir data/mnist --out table-4"),
    "strategy": ("dpcore.cli.accounting.strategy:strategy",
        "Find the best correlated noise for a run, and prove its distance from the best possible.",
        "dpcore strategy optimize --kind dense --workload prefix --steps 1024"),
    "ledger": ("dpcore.cli.accounting.ledger:ledger",
        "Keep the ledger of a data set: the total of what all runs on it have released.",
        "dpcore ledger show patients.ledger"),
}
# fmt: on
COMMANDS = tuple(_COMMANDS)


def application(*commands: str) -> typer.Typer:
    """Return the application. It has the name and one sentence of commands that are not in `commands`."""
    app = Commands(
        name="dpcore",
        help="Differentially private optimization: train with a stated guarantee, and see the cost of noise.",
        epilog="Example:  dpcore train --data digits --model logistic --method disk --epsilon 3 --delta 1e-5",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback(invoke_without_command=True)(_start)
    for name, (place, words, example) in _COMMANDS.items():
        function: Any = _not_used
        if name in commands:
            module, _, attribute = place.partition(":")
            function = getattr(import_module(module), attribute)
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=name, no_args_is_help=False, help=words, epilog=f"Example:  {example}")
        else:
            app.command(name, example=example, help=words)(function)
    return app


def _not_used() -> None:
    """Stand in for a command whose name is not among the arguments."""


# Depending on its version, typer brings its own copy of click or uses the installed one: look which.
_UsageProblem = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _start(
    context: typer.Context,
    version: Annotated[bool, flag("--version", "Print the version and stop.")] = False,
    debug: Annotated[bool, flag("--debug", "Show the traceback of an error; with any command.")] = False,  # noqa: ARG001
) -> None:
    if version:
        typer.echo(f"dpcore {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command; never lets a traceback out unless ``--debug`` is among the arguments."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, rest = arguments[:end], arguments[end:]  # what follows -- is a script's
    debug, as_json = "--debug" in own, "--json" in own
    arguments = [*(argument for argument in own if argument != "--debug"), *rest]
    try:
        app = application(*set(COMMANDS).intersection(arguments))
        status = app(args=arguments, prog_name="dpcore", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except BrokenPipeError:
        # The reader of a pipe has gone; closing standard output at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Stopped as stop:
        return _fail(str(stop), stop.status, debug, as_json)
    except DpcoreError as error:
        return _fail(str(error), 2, debug, as_json)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", 2, debug, as_json)
    except MemoryError:
        return _fail("out of memory; a smaller model or data set, or a smaller batch, needs less", 2, debug, as_json)
    except Exception as error:  # noqa: BLE001 (a defect of ours must still be one sentence)
        if isinstance(error, _UsageProblem):
            return _fail(_usage_sentence(error), 2, debug, as_json)
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            return _fail(needs("this command", error.name), 2, debug, as_json)
        first = next(iter(str(error).splitlines()), "no message")
        message = f"unexpected {type(error).__name__}: {first} (--debug shows where; please report it)"
        return _fail(message, 1, debug, as_json)


def _fail(sentence: str, status: int, debug: bool, as_json: bool) -> int:
    if debug:
        traceback.print_exc()
    if as_json:
        sys.stdout.write(json.dumps({"error": sentence, "status": status}) + "\n")
    sys.stderr.write(fitted(f"dpcore: {sentence}", sys.stderr) + "\n")
    return status


def _usage_sentence(error: Any) -> str:
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    given, possible = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if given:  # click lists all that resemble it a little, in no order
        near = nearest(given, possible or ())
        message = f"no such option: {given}" + (f"; did you mean {near}?" if near else "")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "dpcore"
    see = f" (see {command} --help)" if message.endswith("?") else f"; see {command} --help"
    return f"{message[:1].lower()}{message[1:]}{see}"
