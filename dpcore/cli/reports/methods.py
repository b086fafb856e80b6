"""``dpcore methods``: the methods, and the papers that they come from."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from textwrap import wrap

from dpcore.cli.options import Json
from dpcore.cli.output import write_json, write_line
from dpcore.methods import METHODS, PAPERS

_WIDTH, _INDENT = 80, "  "


def methods(as_json: Json = False) -> None:
    """List the methods, each with the paper that it comes from."""
    said = {name: (inspect.getdoc(make) or name).splitlines()[0].replace("`", "") for name, make in METHODS.items()}
    if as_json:
        papers = {name: [{**asdict(paper), "url": paper.url} for paper in PAPERS[name]] for name in METHODS}
        write_json({name: {"summary": said[name], "papers": papers[name]} for name in METHODS})
        return
    for name, sentence in said.items():
        write_line(name)
        for text in (sentence, *(paper.text() for paper in PAPERS[name])):
            for line in wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False):
                write_line(line)
