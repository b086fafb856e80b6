"""What a step of several processes costs on paper: the table of docs/processes.md. What it counts, tests count in runs.

    python asv_benchmarks/processes_on_paper.py

The rates are round numbers of a GPU of 2024, for the proportions only: nothing here was measured.
"""

from __future__ import annotations

SIZES = {"124 million": 124e6, "7 billion": 7e9}
PROCESSES = (1, 8, 512)
TOKENS = 4096 * 1024  # a batch of 4,096 sequences
FLOPS, NETWORK, MEMORY = 4e14, 5e10, 3e12  # a second: operations, bytes sent, bytes moved in memory


def row(dimension: float, processes: int) -> tuple[float, ...]:
    """Return a process's GB sent, GB whole, GB of own pieces, million normals and three times, by DP-Adam in float32.

    Sent: 8 bytes of every other process's sums and 4 of the parameters, one way each. Whole: parameters (4) and sum
    (8). Own: two moments (8), and the summed piece (8) if there are several. Times in seconds: 8 operations per
    parameter and token (forward, activations' gradients, norms and sums), sending, and noise and update (28 bytes per
    coordinate; the arithmetic of the noise hides behind them).
    """
    others = (processes - 1) / processes
    sent, whole = 12 * dimension * others, 12 * dimension
    own = (8 if processes == 1 else 16) * dimension / processes
    normals = dimension / processes
    times = 8 * dimension * TOKENS / FLOPS / processes, sent / NETWORK, 28 * normals / MEMORY
    return sent / 1e9, whole / 1e9, own / 1e9, normals / 1e6, *times


def table() -> str:
    """Return the table of the page."""
    head = ("D", "W", "GB sent", "GB whole", "GB own", "million normals", "s gradients", "s sending", "s noise, update")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, dimension in SIZES.items():
        for processes in PROCESSES:
            label = name if processes == PROCESSES[0] else ""
            cells = (f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in row(dimension, processes))
            lines.append(f"| {label} | {processes:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
