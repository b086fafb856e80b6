"""How long `import dpcore` and the help of the command line take, each time in a new interpreter."""

from __future__ import annotations


class Import:
    """Seconds of an import; what numpy and scipy alone take is the reference."""

    def timeraw_dpcore(self) -> str:
        return "import dpcore"

    def timeraw_all_names(self) -> str:
        return "import dpcore\nfor name in dpcore.__all__: getattr(dpcore, name)"

    def timeraw_numpy_and_scipy(self) -> str:
        return "import numpy, scipy"

    def timeraw_help(self) -> str:
        # asv reads the time from standard output, so the help must not be there.
        return """
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()):
            from dpcore.cli import main
            assert main(["--help"]) == 0
        """
