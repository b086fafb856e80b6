"""The digits by `PrivateClassifier`, by diffprivlib's logistic regression, and by scikit-learn's without privacy.

    python docs/studies/tables.py dpcore --out FILE        # with scikit-learn 1.6 or later
    python docs/studies/tables.py diffprivlib --out FILE   # 0.6.6, with scikit-learn 1.5

Each adds its accuracies on held-out digits, of ten splits, to FILE. Settings are the defaults; the default rate of
`PrivateClassifier` was chosen on these data and on others. In diffprivlib's favor its C is the best of five on the
held-out digits. It promises delta = 0, and dpcore 1e-5 for all of a row.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from study import machine

from dpcore.cli.intervals import mean_interval

EPSILONS = (1, 3, 10)
SPLITS = 10


def of_dpcore() -> Iterator[tuple[str, Callable[[], Any]]]:
    from dpcore.torch.hosts import PrivateClassifier

    yield "scikit-learn, not private", lambda: LogisticRegression(max_iter=1000)
    for epsilon in EPSILONS:
        # Pixels are 1/16 of their value here, as for the others.
        yield (
            f"dpcore, epsilon {epsilon}",
            lambda e=epsilon: PrivateClassifier(classes=range(10), bounds=(0, 1), target_epsilon=e),
        )


def of_diffprivlib() -> Iterator[tuple[str, Callable[[], Any]]]:
    from diffprivlib.models import LogisticRegression as Private

    for epsilon in EPSILONS:
        for c in (0.01, 0.1, 1, 10, 100):
            yield (
                f"diffprivlib, epsilon {epsilon}, C {c}",
                lambda e=epsilon, c=c: Private(epsilon=e, data_norm=8, C=c, max_iter=1000),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=("dpcore", "diffprivlib"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # diffprivlib warns of labels that it reads from the data
    images, labels = load_digits(return_X_y=True)
    found = json.loads(options.out.read_text()) if options.out.exists() else {"machine": {}, "accuracy": {}}
    packages = ("scikit-learn",) if options.library == "dpcore" else ("scikit-learn", "diffprivlib")
    found["machine"][options.library] = machine() | {name: version(name) for name in packages}
    for name, make in of_dpcore() if options.library == "dpcore" else of_diffprivlib():
        scores = []
        for split in range(SPLITS):
            x, held_out, y, truth = train_test_split(images / 16, labels, test_size=0.25, random_state=split)
            scores.append(round(float(make().fit(x, y).score(held_out, truth)), 4))
        mean, half = mean_interval(scores)
        found["accuracy"][name] = {"mean": round(mean, 4), "half_width": round(half, 4), "splits": scores}
        print(name, found["accuracy"][name], flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
