"""The papers that the methods come from: the one table that docs and command line show."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv, or at its publisher if arXiv does not have it.

    Parameters
    ----------
    title : str
        Title of the version that is followed.
    authors : tuple of str
        In the paper's order.
    year : int
        Year of its first version on arXiv, or of its publication.
    arxiv : str
        Its number there.
    doi : str
        Its number with its publisher, if it is not on arXiv.
    """

    title: str
    authors: tuple[str, ...]
    year: int
    arxiv: str = ""
    doi: str = ""

    @property
    def url(self) -> str:
        """The paper's address."""
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else f"https://doi.org/{self.doi}"

    def text(self) -> str:
        """Return the citation as one line of plain text."""
        return f"{', '.join(self.authors)}: {self.title}. {self.year}. {self.url}"

    def markdown(self) -> str:
        """Return the citation as the docs have it."""
        number = f"arXiv {self.arxiv}" if self.arxiv else f"doi {self.doi}"
        return f"{', '.join(self.authors)}: *{self.title}*, {self.year}, [{number}]({self.url})"


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
_CLIPPING_BIAS = Paper(
    "A Theory to Instruct Differentially-Private Learning via Clipping Bias Reduction",
    ("Hanshen Xiao", "Zihang Xiang", "Di Wang", "Srinivas Devadas"),
    2023,
    doi="10.1109/SP46215.2023.10179409",
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
    "inner_outer": (_PMLF, _CLIPPING_BIAS),  # the first describes it, as its baseline; the second proposed it
    "memf": (_SRG, _MULTI_EPOCH),
    "srg_memf": (_SRG,),
    "accelerated_srgd": (_SRG,),
    "dp_adam": (_ADAPTIVE,),
    "dp_adagrad": (_ADAPTIVE,),
}
"""By the name of the method, the paper that is followed first."""
