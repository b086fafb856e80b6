"""How long `import dpcore` takes, each time in a new interpreter."""

from __future__ import annotations


class Import:
    """Seconds of an import; what numpy and scipy alone take is the reference."""

    def timeraw_dpcore(self) -> str:
        return "import dpcore"

    def timeraw_numpy_and_scipy(self) -> str:
        return "import numpy, scipy"
