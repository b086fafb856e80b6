"""The papers that the methods come from: the one table that docs and command line show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Paper:
    """A paper, as arXiv has it.

    Parameters
    ----------
    title : str
        Of the version that is followed.
    authors : tuple of str
        In the paper's order.
    year : int
        Of its first version on arXiv.
    arxiv : str
        Its number there.
    """

    title: str
    authors: tuple[str, ...]
    year: int
    arxiv: str

    @property
    def url(self) -> str:
        """Where it can be read."""
        return f"https://arxiv.org/abs/{self.arxiv}"

    def text(self) -> str:
        """Return the citation as one line of plain text."""
        return f"{', '.join(self.authors)}: {self.title}. {self.year}. {self.url}"

    def markdown(self) -> str:
        """Return the citation as the docs have it."""
        return f"{', '.join(self.authors)}: *{self.title}*, {self.year}, [arXiv {self.arxiv}]({self.url})"


_DP_SGD = Paper(
    "Deep Learning with Differential Privacy",
    ("Martin Abadi", "Andy Chu", "Ian Goodfellow", "H. Brendan McMahan", "Ilya Mironov", "Kunal Talwar", "Li Zhang"),
    2016,
    "1607.00133",
)
_DOPPLER = Paper(
    "DOPPLER: Differentially Private Optimizers with Low-pass Filter for Privacy Noise Reduction",
    ("Xinwei Zhang", "Zhiqi Bu", "Mingyi Hong", "Meisam Razaviyayn"),
    2024,
    "2408.13460",
)
_DISK = Paper(
    "DiSK: Differentially Private Optimizer with Simplified Kalman Filter for Noise Reduction",
    ("Xinwei Zhang", "Zhiqi Bu", "Borja Balle", "Mingyi Hong", "Meisam Razaviyayn", "Vahab Mirrokni"),
    2024,
    "2410.03883",
)
_PMLF = Paper(
    "Enhancing DPSGD via Per-Sample Momentum and Low-Pass Filtering",
    ("Xincheng Xu", "Thilina Ranbaduge", "Qing Wang", "Thierry Rakotoarivelo", "David Smith"),
    2025,
    "2511.08841",
)
_SRG = Paper(
    "Optimal Rates for DP-SCO with a Single Epoch and Large Batches",
    ("Christopher A. Choquette-Choo", "Arun Ganesh", "Abhradeep Thakurta"),
    2024,
    "2406.02716",
)
_MULTI_EPOCH = Paper(
    "Multi-epoch matrix factorization mechanisms for private machine learning",
    ("Christopher A. Choquette-Choo", "H. Brendan McMahan", "Keith Rush", "Abhradeep Thakurta"),
    2022,
    "2211.06530",
)
_ADAPTIVE = Paper(
    "On Design Principles for Private Adaptive Optimizers",
    ("Arun Ganesh", "Brendan McMahan", "Abhradeep Thakurta"),
    2025,
    "2507.01129",
)

PAPERS: Final[dict[str, tuple[Paper, ...]]] = {
    "dp_sgd": (_DP_SGD,),
    "doppler": (_DOPPLER,),
    "disk": (_DISK,),
    "pmlf": (_PMLF,),
    "inner_outer": (_PMLF,),  # its baseline
    "memf": (_SRG, _MULTI_EPOCH),
    "srg_memf": (_SRG,),
    "accelerated_srgd": (_SRG,),
    "dp_adam": (_ADAPTIVE,),
    "dp_adagrad": (_ADAPTIVE,),
}
"""By the name of the method, the paper that is followed first."""
