"""Names of other libraries that our docstrings use, so that their links need no network while the site is built.

Intersphinx takes the library's own inventory where it can be fetched and DPCORE_INTERSPHINX=1 asks for that. Else it
takes these few names, with the places where each library has documented them for years.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

# Per library: address, then names by the page (relative, with the anchor) and their role.
BUILT_IN = {name: f"library/functions.html#{name}" for name in ("int", "float", "bool", "object", "property")}
TYPES = {name: f"library/stdtypes.html#{name}" for name in ("str", "bytes", "list", "tuple", "dict", "set")}
ERRORS = {
    name: f"library/exceptions.html#{name}"
    for name in ("ValueError", "TypeError", "RuntimeError", "OSError", "ImportError", "KeyError", "UserWarning")
}
PYTHON = {**BUILT_IN, **TYPES, **ERRORS, "pathlib.Path": "library/pathlib.html#pathlib.Path"}
NUMPY = {
    "numpy.ndarray": "reference/generated/numpy.ndarray.html#numpy.ndarray",
    "numpy.random.Generator": "reference/random/generator.html#numpy.random.Generator",
}
TORCH = {
    "torch.Tensor": "tensors.html#torch.Tensor",
    "torch.nn.Module": "generated/torch.nn.Module.html#torch.nn.Module",
    "torch.optim.Optimizer": "optim.html#torch.optim.Optimizer",
    "torch.utils.data.Dataset": "data.html#torch.utils.data.Dataset",
}
LIBRARIES = {
    "python": ("https://docs.python.org/3/", PYTHON),
    "numpy": ("https://numpy.org/doc/stable/", NUMPY),
    "torch": ("https://docs.pytorch.org/docs/stable/", TORCH),
}


def inventory(library: str, places: dict[str, str]) -> bytes:
    """The names in Sphinx's format, version 2."""
    head = f"# Sphinx inventory version 2\n# Project: {library}\n# Version: \n# The rest is zlib.\n"
    role = {name: "exception" if name in ERRORS else "class" for name in places}
    rows = "".join(f"{name} py:{role[name]} 1 {place} -\n" for name, place in sorted(places.items()))
    return head.replace("The rest is zlib.", "The remainder of this file is compressed using zlib.").encode() + (
        zlib.compress(rows.encode())
    )


def write(app: Any, config: Any) -> None:
    """Write the inventories beside the doctrees, and name them to intersphinx."""
    folder = Path(app.doctreedir) / "inventories"
    folder.mkdir(parents=True, exist_ok=True)
    asked = os.environ.get("DPCORE_INTERSPHINX") == "1"
    for library, (address, places) in LIBRARIES.items():
        path = folder / f"{library}.inv"
        path.write_bytes(inventory(library, places))
        config.intersphinx_mapping[library] = (address, (None, str(path)) if asked else str(path))
