"""Check, then measure, on a bare GPU machine without a network, in chunks of at most eight minutes.

    make gpu PY=python3                                    # all chunks, results in gpu-results/
    make gpu PY=python3 CHUNK=kernels OUT=results          # one chunk of checks, kernels, training, models
    python -m asv_benchmarks.gpu --out results --chunk all --small

Each chunk writes ``<chunk>.json`` under --out as soon as a part is done, so that what ends it early takes nothing away.
What does not fit its limit is left out, and named there. Then the chunks that lie under --out are put together, in
``gpu_<name>.json`` there and in asv_benchmarks/recorded/, and a table is printed; ``--chunk merge`` does only that.

Without a GPU, or with --small, everything runs in small form through Triton's interpreter: nothing of that is a timing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import merge, runner
from .record import CHUNKS


def main() -> int:
    """Run chunks and put their results together; 1 if a part failed."""
    parser = argparse.ArgumentParser(
        prog="python -m asv_benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument("--chunk", choices=(*CHUNKS, "merge", "all"), default="all")
    parser.add_argument("--small", action="store_true", help="everything small, through the interpreter; no timings")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds of a chunk")
    parser.add_argument("--name", help="of the file in asv_benchmarks/recorded/, instead of the GPU's")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if arguments.worker:
        return runner.work(arguments.chunk, out)
    out.mkdir(parents=True, exist_ok=True)
    small = arguments.small
    if arguments.chunk != "merge" and not small and not Path("/dev/nvidiactl").exists():
        print("no NVIDIA device here: --small, through Triton's interpreter; nothing of it is a timing", flush=True)
        small = True
    chosen = CHUNKS if arguments.chunk == "all" else (arguments.chunk,)
    for chunk in chosen:
        if chunk != "merge":
            runner.supervise(chunk, out, small=small, limit=arguments.limit)
    return merge.main(out, arguments.name)


if __name__ == "__main__":
    sys.exit(main())
