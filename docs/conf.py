"""Sphinx settings. `make docs` turns every warning into an error."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "backends"), str(ROOT / "docs" / "_ext")]

project = "dpcore"
author = "The dpcore authors"
copyright = "2026, The dpcore authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
    "dpcore_docs",
]
exclude_patterns = ["_build", "_ext", "examples", "gallery/**/*.ipynb", "gallery/**/*.py"]
html_theme = "furo"
html_title = "dpcore"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
templates_path = ["_templates"]
# furo's own, with the list of versions (docs/versions.py) at the end.
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
        "sidebar/versions.html",
    ]
}

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
intersphinx_mapping: dict[str, tuple[str, object]] = {}  # docs/_ext/inventories.py
# scikit-learn gives its estimators this method, with links into its own pages.
autodoc_default_options = {"members": True, "show-inheritance": False, "exclude-members": "set_score_request"}
# Code in single backticks is a link where it is the name of an object; else it is code.
default_role = "py:obj"

# Every script of docs/examples is executed again when it changed; if it fails, so does the build.
sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 0,
    "write_computation_times": True,
    "matplotlib_animations": False,
    "plot_gallery": "True",
    "remove_config_comments": True,
    "reset_modules": ("matplotlib",),
    "download_all_examples": False,
    "capture_repr": (),
    "reference_url": {"dpcore": None},
}
