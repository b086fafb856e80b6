"""``dpcore inspect``: filters, and the released gradients of a run, in numbers and pictures."""

from __future__ import annotations

from dpcore.cli.options import Commands
from dpcore.cli.reports.inspect_filter import inspect_filter
from dpcore.cli.reports.inspect_gradients import inspect_gradients

inspect = Commands()  # its words stand in dpcore.cli.app
inspect.command("filter", example="dpcore inspect filter b=0.1 a=-0.9 --out momentum.png")(inspect_filter)
inspect.command("gradients", example="dpcore inspect gradients runs/digits-mlp-doppler --out gradients.png")(
    inspect_gradients
)
