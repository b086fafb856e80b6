"""Sphinx settings. `make docs` turns every warning into an error."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

project = "dpcore"
author = "The dpcore authors"
copyright = "2026, The dpcore authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "dpcore"
html_static_path = ["_static"]

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings follow numpydoc, which lints them; napoleon renders them: it can be taught our section "Guarantees".
napoleon_google_docstring = False
napoleon_custom_sections = ["Guarantees"]
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
# Types in docstrings are words; a word that is the name of several things ("steps", "Averaging") needs no target.
suppress_warnings = ["ref.python"]
autodoc_default_options = {"members": True, "show-inheritance": False}
# Code in single backticks is the docstring convention of the field; it is not a cross-reference.
default_role = "code"
