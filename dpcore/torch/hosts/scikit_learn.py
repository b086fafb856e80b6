"""`PrivateClassifier` and `PrivateRegressor`: estimators of scikit-learn, for tables, fitted by a private run.

What an estimator usually learns from a table before it trains is private: means and deviations of columns, the values
that occur in a column or among the labels, the range of targets. Here it is declared. `fit` uses the values in a table
for two purposes only: the clipped sums of the run, and errors and warnings for the one who has the data. Public are the
number of rows, as for `dpcore.torch.make_private`, and the names and order of columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from dpcore.errors import ArgumentError, ArgumentTypeError, MissingPackageError, TrainingWarning
from dpcore.methods import METHODS
from dpcore.sampling.factory import has_fixed_size
from dpcore.spec import validate
from dpcore.spec.extras import needs
from dpcore.torch.make_private import make_private
from dpcore.torch.randomness import seeded

if find_spec("sklearn") is None:
    raise MissingPackageError(needs("an estimator for tables", "scikit-learn"), name="sklearn")

from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

PUBLIC_CLASSES = (
    "Which labels occur in the data was taken as public knowledge (classes='public'): it was read without noise, and "
    "epsilon does not cover it."
)
"""A sentence of the statement."""
_CPU = torch.device("cpu")


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What the classifier and the regressor share: the settings, the table as numbers, and the run."""

    target_epsilon: float = 1.0
    delta: float | None = None
    method: str = "dp_sgd"
    lr: float = 1.0
    max_grad_norm: float = 1.0
    method_options: Mapping[str, Any] | None = None
    epochs: float = 10
    sample_rate: float = 0.1
    sampling: str = "poisson"
    hidden_layer_sizes: Sequence[int] = ()
    bounds: Any = None
    categories: Mapping[Any, Sequence[Any]] | None = None
    random_state: Any = None
    ledger: Any = None
    data_id: str | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # no random_state repeats the noise
        return tags

    def _checked(self, X: Any, y: Any) -> tuple[NDArray[np.float64], Any]:
        """Return the table as numbers, and the targets, of equal length."""
        for name in [name for name in vars(self) if name.endswith("_")]:  # if this fit fails, nothing of another stays
            delattr(self, name)
        _check_order(X, y)
        _refuse_complex(X=X, y=y)
        raw, targets = validate_data(self, X, y, ensure_min_samples=2, **_as_it_is(X))
        self.encoding_ = self.bounds, self.categories or {}  # settings may change after the fit
        return self._numbers(raw, training=True), targets

    def _numbers(self, raw: Any, training: bool = False) -> NDArray[np.float64]:
        """Return a checked table as numbers, each row by itself and by what was declared only."""
        columns = list(getattr(self, "feature_names_in_", range(raw.shape[1])))
        bounds, categories = self.encoding_
        categories = _by_column("categories", categories, columns)
        numbers = [column for column in columns if column not in categories]
        bounds = bounds if isinstance(bounds, Mapping) else dict.fromkeys(numbers, bounds)
        bounds, blocks = _by_column("bounds", bounds, numbers), []
        for place, column in enumerate(columns):
            values = raw[:, place]
            if column in categories:
                known = list(validate.sequence("values", **{f"categories[{column!r}]": categories[column]}))
                found = _places(values, known)
                if training and (found == len(known)).any():
                    warnings.warn(_UNKNOWN.format(column), TrainingWarning, stacklevel=5)
                blocks.append(np.eye(len(known) + 1, len(known))[found])
                continue
            values = _floats(values, f"X, column {column!r}", _REMEDY)
            if bounds.get(column) is not None:
                values = _scaled(values, *_interval(f"bounds of column {column!r}", bounds[column]))
            blocks.append(values[:, None])
        return np.concatenate(blocks, axis=1)

    def _train(self, table: NDArray[np.float64], targets: NDArray[Any], outputs: int, loss: Callable[..., Any]) -> None:
        """Train a fresh model by a run of its own, and keep what it releases: nothing of the data, and no key."""
        rows, rate = len(table), validate.fraction(sample_rate=self.sample_rate)
        steps = max(1, round(validate.positive(epochs=self.epochs) / rate))
        batch_size = max(1, round(rate * rows)) if has_fixed_size(self.sampling) else rate * rows
        settings = {"lr": self.lr, "max_grad_norm": self.max_grad_norm, "batch_size": batch_size}
        method = METHODS[validate.choice(METHODS, method=self.method)](**{**settings, **(self.method_options or {})})
        model = self._model(table.shape[1], outputs)
        run = make_private(
            model,
            (torch.from_numpy(table.astype(np.float32)), torch.from_numpy(targets)),
            method,
            target_epsilon=self.target_epsilon,
            target_delta=min(1e-5, 0.1 / rows) if self.delta is None else validate.open_unit(delta=self.delta),
            steps=steps,
            loss=loss,
            sampling=self.sampling,
            ledger=self.ledger,
            data_id=self.data_id,
            run_name=None if self.ledger is None else f"{type(self).__name__}, {self.method}",
        )
        try:
            while run.steps_taken < steps:
                for batch in run.loader:
                    run.step(batch)
        finally:
            run.close()
        model.load_state_dict(run.output_state_dict())
        self.model_ = model.double().requires_grad_(False).eval()
        self.statement_, self.epsilon_ = run.statement(), run.epsilon()

    def _model(self, inputs: int, outputs: int) -> nn.Sequential:
        """Return linear layers with tanh between; the last one begins at zero, the others as torch's do."""
        sizes = validate.sequence(hidden_layer_sizes=self.hidden_layer_sizes)
        hidden = [validate.integer(minimum=1, hidden_layer_sizes=size) for size in sizes]
        seed = check_random_state(self.random_state).bytes(32)
        with seeded(_CPU, seed, others=False):
            layers = [[nn.Linear(*sizes), nn.Tanh()] for sizes in pairwise((inputs, *hidden))]
            last = nn.Linear((inputs, *hidden)[-1], outputs)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        return nn.Sequential(*(layer for pair in layers for layer in pair), last)

    def _outputs(self, X: Any) -> torch.Tensor:
        """Return what the fitted model says of each row."""
        check_is_fitted(self, "model_")
        _refuse_complex(X=X)
        raw = validate_data(self, X, reset=False, **_as_it_is(X))
        outputs: torch.Tensor = self.model_(torch.from_numpy(self._numbers(raw)))
        return outputs


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, PrivateEstimator):  # type: ignore[misc]
    """A classifier for tables whose fit is differentially private: logistic regression, or a small network.

    Parameters
    ----------
    classes : sequence of labels, or "public"
        The labels that there may be. "public" reads them from `y`: only if everybody may know which labels occur, since
        a label that one row alone has would show this row. The statement then says so.
    target_epsilon, delta : float, optional
        The privacy of one `fit`. By default delta is 1e-5, or a tenth of 1/n for more than 10,000 rows.
    method, lr, max_grad_norm, method_options
        A name of `dpcore.methods.METHODS`, its learning rate and clip norm, and its other keywords as a mapping.
    epochs, sample_rate : float
        The plan: ``epochs / sample_rate`` steps, each with a share `sample_rate` of the rows expected.
    sampling : str
        See `dpcore.torch.make_private`. If it draws batches of a fixed size, as "fixed-order" and "shuffled" do, the
        share of the rows is rounded to a whole number, at least 1.
    hidden_layer_sizes : sequence of int
        Widths of the layers with tanh before the last one. Without any the model is linear.
    bounds : (low, high), or mapping of column to (low, high), optional
        Values of these columns are clipped to their bounds, which are mapped to [-1, 1]; others are taken as they are.
        A column is named by its name in a DataFrame, and by its number in an array. Bounds must be known without the
        data, as those of `categories` and `classes`.
    categories : mapping of column to sequence of values, optional
        Columns of text or codes: each becomes one number for each value, 1 where it is the row's and 0 elsewhere.
        Missing and other values get zeros.
    random_state : int, numpy.random.RandomState or None
        Seed of the initial weights, which are public. It never decides noise or batches: these come from a secret
        key, and no two fits are alike.
    ledger, data_id : optional
        See `dpcore.torch.make_private`; the ledger's path. Each `fit` is a run of its own, and is paid for.

    Attributes
    ----------
    classes_ : numpy.ndarray
        The labels, sorted.
    statement_ : Statement
        The privacy statement of the last `fit`.
    epsilon_ : float
        Its epsilon.
    model_ : torch.nn.Sequential
        In float64; it takes the encoded table.
    n_features_in_, feature_names_in_
        As of every estimator.

    Notes
    -----
    The guarantee is of this estimator's `fit` alone. A scaler, an imputer by means or a selection of columns before it
    in a pipeline learns from the data without noise; a search over settings makes one run for each fit; and scores on
    rows that have no other protection publish these. Rows that are
    there several times, as after oversampling or in the bootstrap of `BaggingClassifier`, are protected one by one, and
    their person less. A fitted estimator has neither rows nor keys and may be pickled.

    Errors say whether something in the table does not fit, but show no value. They depend on the data: they are for the
    one who has it. Weights of rows are not supported.

    Examples
    --------
    >>> from dpcore.torch.hosts import PrivateClassifier
    >>> model = PrivateClassifier(classes=["no", "yes"], target_epsilon=3, bounds=(0, 16))
    """

    classes: Any = None

    def fit(self, X: Any, y: Any) -> PrivateClassifier:
        """Train a fresh model privately.

        Parameters
        ----------
        X : DataFrame or array of shape (n, columns)
            Rows are paired with `y` by position.
        y : array of shape (n,)
            Labels: numbers or texts.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For settings that do not fit, columns with missing values or undeclared texts, and labels that are none of
            `classes`.
        PrivacyError
            If the target is out of reach, or the ledger's budget does not allow a step.
        """
        table, labels = self._checked(X, y)
        public = isinstance(self.classes, str) and self.classes == "public"
        if not public and (isinstance(self.classes, str) or not hasattr(self.classes, "__getitem__")):
            raise ArgumentError(
                f"classes={self.classes!r}: must list the labels, as [0, 1]; or be 'public', if everybody may know "
                "which labels occur in the data, since they are then read from them without noise"
            )
        check_classification_targets(labels)
        classes = np.unique(labels if public else np.asarray(self.classes))
        if len(classes) < 2:
            raise ArgumentError(f"classes={self.classes!r}: must be at least two classes")
        targets = _places(labels, classes.tolist())
        if (targets == len(classes)).any():
            raise ArgumentError(
                f"y: must have only labels of classes={classes.tolist()}; some are others (none is shown, as labels "
                "are private)"
            )
        self._train(table, targets, len(classes), F.cross_entropy)
        self.classes_ = classes
        if public:
            self.statement_ = replace(self.statement_, caveats=(*self.statement_.caveats, PUBLIC_CLASSES))
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability of each class, of shape (n, classes), for the rows of `X`."""
        probabilities: NDArray[np.float64] = self._outputs(X).softmax(1).numpy()
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable label of each row of `X`."""
        places = self._outputs(X).argmax(1).numpy()
        labels: NDArray[Any] = self.classes_[places]
        return labels


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(RegressorMixin, PrivateEstimator):  # type: ignore[misc]
    """A regressor for tables whose fit is differentially private: least squares, linear or by a small network.

    Parameters
    ----------
    target_bounds : (low, high), optional
        Targets are clipped to these bounds, which are mapped to [-1, 1] for the fit; predictions have the targets' own
        unit. They must be known without the data. By default targets are taken as they are; if they are far from 1 in
        size, training is slow.

    Attributes
    ----------
    statement_ : Statement
        The privacy statement of the last `fit`.
    epsilon_ : float
        Its epsilon.
    model_ : torch.nn.Sequential
        In float64; it takes the encoded table.
    n_features_in_, feature_names_in_
        As of every estimator.

    Notes
    -----
    All other parameters, and what the guarantee is of: `PrivateClassifier`.
    """

    lr: float = 0.1
    target_bounds: tuple[float, float] | None = None

    def fit(self, X: Any, y: Any) -> PrivateRegressor:
        """Train a fresh model privately.

        Parameters
        ----------
        X : DataFrame or array of shape (n, columns)
            Rows are paired with `y` by position.
        y : array of shape (n,)
            Numbers.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For settings that do not fit, and columns with missing values or undeclared texts.
        PrivacyError
            If the target is out of reach, or the ledger's budget does not allow a step.
        """
        table, targets = self._checked(X, y)
        targets = _floats(targets, "y", "targets are numbers")
        given = self.target_bounds
        self.target_bounds_ = None if given is None else _interval("target_bounds", given)
        if self.target_bounds_ is not None:
            targets = _scaled(targets, *self.target_bounds_)
        self._train(table, targets.astype(np.float32)[:, None], 1, F.mse_loss)
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the predicted target of each row of `X`."""
        predicted: NDArray[np.float64] = self._outputs(X)[:, 0].numpy()
        if self.target_bounds_ is None:
            return predicted
        low, high = self.target_bounds_
        return low + (predicted + 1) * (high - low) / 2


_REMEDY = (
    "give numbers, a constant that is known without the data for missing values, or a column's values by categories="
)
_UNKNOWN = (
    "X, column {!r}: some values are missing or none of its categories, and become zeros (none is shown). This remark "
    "is about private data: keep it with them"
)


def _check_order(X: Any, y: Any) -> None:
    """Refuse a DataFrame and a Series whose indexes name the same rows in different orders."""
    ours: Any = getattr(X, "index", None)
    theirs: Any = getattr(y, "index", None)
    if not hasattr(ours, "equals") or not hasattr(theirs, "equals") or ours.equals(theirs):
        return
    if len(ours) == len(theirs) and ours.isin(theirs).all() and theirs.isin(ours).all():
        raise ArgumentError(
            "X, y: have one index in two orders, but are paired by position; give y.loc[X.index], or y.to_numpy() "
            "if its order is that of X"
        )


def _refuse_complex(**given: Any) -> None:
    """Refuse complex numbers; scikit-learn's own error shows them."""
    for name, values in given.items():
        if not hasattr(values, "columns") and np.iscomplexobj(values):
            raise ArgumentError(f"{name}: Complex data not supported; must be real numbers")


def _as_it_is(X: Any) -> dict[str, Any]:
    """Return options of scikit-learn's checks that leave the values to us: its own errors show some.

    A DataFrame with more than numbers becomes an array of objects.
    """
    mixed = any(getattr(dtype, "kind", "O") not in "biuf" for dtype in getattr(X, "dtypes", ()))
    return {"dtype": object if mixed else None, "ensure_all_finite": False}


def _by_column(name: str, given: Any, columns: list[Any]) -> dict[Any, Any]:
    """Return a setting by column, of columns that exist."""
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(f"{name}={given!r}: must be a mapping from columns")
    for column in given:
        if column not in columns:
            raise ArgumentError(f"{name}: column {column!r} must be one of {columns}")
    return dict(given)


def _interval(name: str, value: Any) -> tuple[float, float]:
    if len(validate.sequence(**{name: value})) != 2:
        raise ArgumentError(f"{name}={value!r}: must be a pair (low, high)")
    low, high = (validate.number(**{name: each}) for each in value)
    if not low < high:
        raise ArgumentError(f"{name}={value!r}: must be a pair (low, high) with low < high")
    return low, high


def _scaled(values: NDArray[Any], low: float, high: float) -> NDArray[np.float64]:
    """Return values clipped to [low, high], which is mapped to [-1, 1]."""
    scaled: NDArray[np.float64] = (np.clip(values, low, high) - low) / (high - low) * 2 - 1
    return scaled


def _places(values: NDArray[Any], known: Sequence[Any]) -> NDArray[np.int64]:
    """Return the place of each value among the known ones, and ``len(known)`` for all others."""
    places = {value: place for place, value in enumerate(known)}
    found = (places.get(value, len(known)) if isinstance(value, Hashable) else len(known) for value in values.tolist())
    return np.fromiter(found, np.int64, len(values))


def _floats(values: NDArray[Any], what: str, remedy: str) -> NDArray[np.float64]:
    """Return finite numbers. Errors show no value."""
    if values.dtype.kind in "mM":
        raise ArgumentTypeError(f"{what}: has dates or times; {remedy}")
    try:
        numbers = values.astype(np.float64)
    except TypeError as cause:  # names a type only
        raise ArgumentTypeError(f"{what}: {cause}; {remedy}") from None
    except ValueError:
        raise ArgumentError(f"{what}: has texts that are no numbers; {remedy}") from None
    if not np.isfinite(numbers).all():
        raise ArgumentError(f"{what}: has NaN or infinity; {remedy}")
    return numbers
