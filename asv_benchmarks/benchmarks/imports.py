"""How long `import dpcore` takes, each time in a new interpreter."""

from __future__ import annotations


class Import:
    """Seconds of an import; the interpreter's own start is in the reference."""

    def timeraw_dpcore(self) -> str:
        return "import dpcore"

    def timeraw_reference(self) -> str:
        return "pass"

    def timeraw_numpy_and_scipy(self) -> str:
        return "import numpy, scipy"
