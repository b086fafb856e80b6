"""The commands in one place, and the one place where exceptions become a sentence and an exit status."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from dpcore.cli.accounting.calibrate import calibrate
from dpcore.cli.accounting.curve import curve
from dpcore.cli.accounting.delta import delta
from dpcore.cli.accounting.epsilon import epsilon
from dpcore.cli.accounting.ledger import ledger
from dpcore.cli.compare.compare import compare
from dpcore.cli.compare.demo import demo
from dpcore.cli.reports.audit import audit
from dpcore.cli.reports.inspect import inspect
from dpcore.cli.reports.statement import statement
from dpcore.cli.reports.verify import verify
from dpcore.cli.train.interrupt import Stopped
from dpcore.cli.train.train import train
from dpcore.errors import DpcoreError
from dpcore.spec.version import __version__

app = typer.Typer(
    name="dpcore",
    help="Differentially private optimization: train with a stated guarantee, and know what noise costs.",
    epilog="Example:  dpcore train --data digits --model logistic --method disk --epsilon 3 --delta 1e-5",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for _command, _example in (
    (train, "dpcore train --data digits --model mlp --method disk --epsilon 3 --delta 1e-5 --epochs 10"),
    (compare, "dpcore compare --methods dp_sgd,doppler,disk --epsilon 1,8 --lr 0.25,0.5,1 --epochs 5 --out comparison"),
    (epsilon, "dpcore epsilon --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --delta 1e-6"),
    (delta, "dpcore delta --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --epsilon 2"),
    (calibrate, "dpcore calibrate --dataset-size 60000 --batch-size 256 --epochs 10 --epsilon 3 --delta 1e-5"),
    (curve, "dpcore curve steps --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --delta 1e-6 --out curve.png"),
    (statement, "dpcore statement runs/digits-mlp-disk"),
    (verify, "dpcore verify runs/digits-mlp-disk/statement.json"),
    (audit, "dpcore audit --method disk --sampling poisson --noise-multiplier 2 --canaries 128"),
    (demo, "dpcore demo --out demo"),
):
    app.command(_command.__name__, epilog=f"Example:  {_example}")(_command)
app.add_typer(inspect)
app.add_typer(ledger)

# typer brings its own copy of click or uses the installed one, depending on its version: ask it which.
_UsageProblem = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", metavar=" ", help="Print the version and stop.")] = False,
) -> None:
    if version:
        typer.echo(f"dpcore {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command; never lets a traceback out unless ``--debug`` is among the arguments."""
    debug, as_json = "--debug" in arguments, "--json" in arguments
    try:
        status = app(args=list(arguments), prog_name="dpcore", standalone_mode=False)
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
        message = f"unexpected {type(error).__name__}: {_first_line(error)} (--debug shows where; please report it)"
        return _fail(message, 1, debug, as_json)


def _fail(sentence: str, status: int, debug: bool, as_json: bool) -> int:
    if debug:
        traceback.print_exc()
    if as_json:
        sys.stdout.write(json.dumps({"error": sentence, "status": status}) + "\n")
    sys.stderr.write(f"dpcore: {sentence}\n")
    return status


def _usage_sentence(error: Exception) -> str:
    message = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    message = " ".join(message.split()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "dpcore"
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no message")
