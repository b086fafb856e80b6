"""`PrivateClassifier` and `PrivateRegressor`: scikit-learn's own checks, and what is private by construction."""

import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator

from dpcore.errors import ArgumentError, ArgumentTypeError, MissingPackageError, TrainingWarning
from dpcore.ledger import Ledger
from dpcore.spec.keys import RunKeys
from dpcore.statement.verify import verify
from dpcore.torch import PrivateRun
from dpcore.torch.hosts import PrivateClassifier, PrivateRegressor, scikit_learn
from dpcore.torch.model.state_probe import walk
from tests.depth import chosen

SHORT = {"target_epsilon": 300.0, "epochs": 2, "sample_rate": 0.25}


class Repeated:
    """Of estimators whose keys are set equal: then they promise what is promised of deterministic ones."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.non_deterministic = False
        return tags


class RepeatedClassifier(Repeated, PrivateClassifier):
    pass


class RepeatedRegressor(Repeated, PrivateRegressor):
    pass


CLASSIFIER = {"classes": "public", **SHORT}
REGRESSOR = {"target_bounds": (-5, 5), "lr": 0.2, **SHORT}
# The exceptions: these checks fit twice and want equal predictions, but every fit has noise of its own. With equal keys
# they pass (below).
FIT_TWICE = {
    "check_classifier_data_not_an_array", "check_regressor_data_not_an_array", "check_supervised_y_2d",
    "check_regressors_int", "check_fit_idempotent",
}  # fmt: skip
USUAL = {
    "check_parameters_default_constructible", "check_no_attributes_set_in_init", "check_estimators_pickle",
    "check_do_not_raise_errors_in_init_or_set_param", "check_dont_overwrite_attributes", "check_estimators_unfitted",
    "check_estimators_nan_inf", "check_supervised_y_no_nan", "check_fit1d", "check_fit2d_1sample",
    "check_dict_unchanged", "check_n_features_in_after_fitting", "check_requires_y_none", "check_complex_data",
    "check_estimators_empty_data_messages", "check_readonly_memmap_input", "check_classifiers_regression_target",
    "check_classifiers_one_label", "check_estimator_sparse_array", "check_methods_subset_invariance",
}  # fmt: skip


def checks(estimator: Any, names: Callable[[str], bool]) -> Iterator[Any]:
    """Yield scikit-learn's checks of these names."""
    for one, check in estimator_checks_generator(estimator, legacy=True):
        name = check.func.__name__
        if names(name):
            yield pytest.param(partial(check, one), id=f"{type(one).__name__}-{name}")


FRESH = [
    check
    for estimator in (PrivateClassifier(**CLASSIFIER), PrivateRegressor(**REGRESSOR))
    for check in checks(estimator, lambda name: name not in FIT_TWICE and name in chosen(USUAL, name))
]
EQUAL = [
    check
    for estimator in (RepeatedClassifier(**CLASSIFIER), RepeatedRegressor(**REGRESSOR))
    for check in checks(estimator, lambda name: name in chosen("check_fit_idempotent check_supervised_y_2d", name))
]


@pytest.mark.parametrize("check", FRESH)
@pytest.mark.filterwarnings("ignore")
def test_check_estimator(check: Callable[[], None]):
    check()


@pytest.mark.parametrize("check", EQUAL)
@pytest.mark.filterwarnings("ignore")
def test_check_estimator_with_equal_keys(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch):
    new = RunKeys.new
    monkeypatch.setattr(RunKeys, "new", lambda key, exact_key: new(bytes(range(32)), exact_key=True))
    check()


def test_the_checks_are_there():
    assert len(FRESH) > 25
    assert {name for each in EQUAL for name in FIT_TWICE if each.id.endswith(name)} >= {"check_fit_idempotent"}


X = np.linspace(-1, 1, 120).reshape(40, 3)
Y = np.arange(40) % 2
QUICK = {"classes": [0, 1], "target_epsilon": 3.0, "epochs": 1, "sample_rate": 0.25}


class Seen(Exception):
    """What `make_private` was given."""


def given(estimator: Any, X: Any, y: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What a run of the estimator would begin with: the table, the targets, the weights, and all settings."""

    def seen(model: Any, data: Any, method: Any, **options: Any) -> None:
        raise Seen(*data, model.state_dict(), method.describe(), options)

    monkeypatch.setattr(scikit_learn, "make_private", seen)
    with pytest.raises(Seen) as found:
        estimator.fit(X, y)
    monkeypatch.undo()
    return found.value.args


@pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])
@pytest.mark.filterwarnings("ignore::dpcore.errors.TrainingWarning")
def test_another_row_changes_its_own_row_and_nothing_else(kind: Any, monkeypatch: pytest.MonkeyPatch):
    """Neighbors begin with the same model, plan and rows: nothing is learned from the table before the run."""
    declared = {"classes": [0, 1, 2]} if kind is PrivateClassifier else {"target_bounds": (0, 5)}
    estimator = kind(bounds={0: (0, 2)}, categories={1: [7, 8, 9]}, hidden_layer_sizes=(4,), random_state=0, **declared)
    table = np.stack([np.arange(40) % 5, 7 + np.arange(40) % 2, np.arange(40) / 40], axis=1)
    other, labels = table.copy(), Y.copy()
    other[3], labels[3] = (1e9, 9, -1e9), 2
    rows, targets, *rest = given(estimator, table, Y, monkeypatch)
    new_rows, new_targets, *new_rest = given(estimator, other, labels, monkeypatch)
    assert str(rest) == str(new_rest)
    assert (rows != new_rows).any(1).nonzero().tolist() == [[3]]
    assert (targets != new_targets).reshape(40, -1).any(1).nonzero().tolist() == [[3]]
    assert new_rows[3].tolist() == [1, 0, 0, 1, -1e9]  # clipped, one of three values, as it is


def test_random_state_is_of_the_weights_only(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_rng_state()
    one, two, three = (PrivateClassifier(**QUICK, hidden_layer_sizes=(3,), random_state=seed) for seed in (1, 1, 2))
    weights = [given(each, X, Y, monkeypatch)[2]["0.weight"] for each in (one, two, three)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    fitted = [each.fit(X, Y).model_[0].weight for each in (one, two)]
    assert not torch.equal(*fitted)  # the noise is each run's own
    assert torch.equal(torch.get_rng_state(), before)


def test_the_statement_is_that_of_the_plan():
    fitted = PrivateClassifier(**{**QUICK, "epochs": 2}).fit(X, Y)
    statement = fitted.statement_
    assert (statement.steps_taken, statement.steps_planned) == (8, 8)
    assert statement.delta == pytest.approx(1e-5)
    assert statement.sampler["dataset_size"] == 40
    assert statement.event["sample_rate"] == pytest.approx(0.25)
    assert 2.9 < fitted.epsilon_ <= 3
    assert not [finding for finding in verify(statement) if finding.status == "failed"]


def test_classes_are_declared_or_said_to_be_public():
    for classes in (None, "yes", {0, 1}):
        with pytest.raises(ArgumentError, match="must list the labels"):
            PrivateClassifier(**{**QUICK, "classes": classes}).fit(X, Y)
    with pytest.raises(ArgumentError, match="some are others") as refused:
        PrivateClassifier(**QUICK).fit(X, np.where(np.arange(40) == 5, 987, Y))
    assert "987" not in str(refused.value)
    words = np.where(Y, "yes, gladly", "no").astype(object)
    declared = PrivateClassifier(**{**QUICK, "classes": ["yes, gladly", "no", "perhaps"]}).fit(X, words)
    assert declared.classes_.tolist() == ["no", "perhaps", "yes, gladly"]
    assert declared.predict_proba(X).shape == (40, 3)
    assert set(declared.predict(X)) <= set(declared.classes_)
    public = PrivateClassifier(**{**QUICK, "classes": "public"}).fit(X, words)
    said = "Which labels occur in the data was taken as public"
    assert public.statement_.caveats[-1].startswith(said)
    assert not any(caveat.startswith(said) for caveat in declared.statement_.caveats)


def test_a_fitted_estimator_has_neither_rows_nor_keys():
    fitted = PrivateClassifier(**QUICK).fit(X, Y)
    for _, value, _ in walk({"fitted": fitted}):
        assert not isinstance(value, (PrivateRun, RunKeys))
        assert not isinstance(value, (torch.Tensor, np.ndarray)) or len(X) not in value.shape
    again = pickle.loads(pickle.dumps(fitted))  # noqa: S301 - our own
    assert np.array_equal(again.predict_proba(X), fitted.predict_proba(X))
    assert again.statement_ == fitted.statement_


def test_every_fit_is_paid_for(tmp_path: Path):
    ledger = Ledger.create(tmp_path / "rows.ledger", budget=(10, 1e-4))
    model = PrivateClassifier(**QUICK, ledger=str(ledger.path), data_id="rows")
    model.fit(X, Y)
    clone(model).fit(X, Y)
    assert [(run.name, run.releases) for run in ledger.runs()] == [("PrivateClassifier, dp_sgd", 4)] * 2
    assert model.statement_.ledger["total"]


def test_targets_have_their_own_unit():
    targets = 1000 + 50 * X[:, 0]
    model = PrivateRegressor(target_epsilon=300, epochs=20, sample_rate=0.5, lr=0.3, target_bounds=(900, 1100))
    assert model.fit(X, targets).score(X, targets) > 0.95
    predicted = model.predict(X)
    model.set_params(target_bounds=(0, 1), bounds=(5, 6))  # for another fit
    assert np.array_equal(model.predict(X), predicted)
    clipped = PrivateRegressor(**{**REGRESSOR, "target_bounds": (1040, 1041)})
    assert clipped.fit(X, targets).predict(X).max() < 1042


def test_other_methods_and_networks():
    adam = {"method": "dp_adam", "lr": 0.01, "method_options": {"betas": (0.8, 0.9)}, "hidden_layer_sizes": [5, 4]}
    fitted = PrivateClassifier(**QUICK, **adam).fit(X, Y)
    assert [tuple(weight.shape) for weight in fitted.model_.parameters()] == [(5, 3), (5,), (4, 5), (4,), (2, 4), (2,)]
    assert fitted.statement_.method["name"] == "dp_adam"


def test_pipelines_and_searches():
    table = np.where(np.arange(120).reshape(40, 3) == 7, np.nan, X)
    pipeline = make_pipeline(SimpleImputer(strategy="constant", fill_value=0), PrivateClassifier(**QUICK))
    search = GridSearchCV(pipeline, {"privateclassifier__lr": [0.1, 1]}, cv=2).fit(table, Y)
    assert search.best_estimator_[-1].epsilon_ <= 3


@pytest.mark.filterwarnings("ignore::dpcore.errors.TrainingWarning")
def test_data_frames_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"age": np.arange(40), "color": pd.Categorical(["red", "blue"] * 20), "member": Y == 1})
    frame["pay"] = pd.array(np.arange(40), dtype="Int64")
    labels = pd.Series(Y, index=frame.index)
    options = {**QUICK, "bounds": {"age": (0, 100)}, "categories": {"color": ["red", "green", "blue"]}}
    model = PrivateClassifier(**options)
    rows, targets, *_ = given(model, frame, labels, monkeypatch)
    assert rows[1].tolist() == pytest.approx([-0.98, 0, 0, 1, 1, 1])
    order = np.random.default_rng(0).permutation(40)
    shuffled, new, *_ = given(model, frame.iloc[order], labels.iloc[order], monkeypatch)
    assert torch.equal(shuffled, rows[order])
    assert torch.equal(new, targets[order])
    with pytest.raises(ArgumentError, match="in two orders"):
        model.fit(frame.iloc[order], labels)
    assert model.fit(frame, labels).feature_names_in_.tolist() == ["age", "color", "member", "pay"]
    assert model.predict(frame.head(3)).shape == (3,)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["color", "age", "member", "pay"]])
    frame.loc[4, "color"] = None
    with pytest.warns(TrainingWarning, match="'color'.*become zeros"):
        rows, *_ = given(model, frame, labels, monkeypatch)
    assert rows[4, 1:4].tolist() == [0, 0, 0]
    frame.loc[5, "pay"] = pd.NA
    with pytest.raises(ArgumentTypeError, match=r"column 'pay': .*missing values"):
        model.fit(frame, labels)


TEXTS = np.array([[1, "secret"]] * 40, dtype=object)
DATES = np.full((40, 1), "2026-01-01", dtype="datetime64[D]")
HOLES = np.where(np.arange(40) == 3, np.nan, 1.0)[:, None]


@pytest.mark.parametrize(
    ("options", "table", "words"),
    [
        ({}, TEXTS, "column 1: has texts that are no numbers"),
        ({}, DATES, "column 0: has dates or times"),
        ({}, HOLES, "column 0: has NaN or infinity; give numbers, a constant that is known without the data"),
        ({"bounds": {5: (0, 1)}}, X, "bounds: column 5 must be one of"),
        ({"bounds": {1: (0, 1)}, "categories": {1: [0]}}, X, "bounds: column 1 must be one of"),
        ({"bounds": (1, 0)}, X, "low < high"),
        ({"bounds": {0: 3}}, X, "bounds of column 0=3: must be a sequence"),
        ({"categories": {0: "abc"}}, X, r"categories\[0\]='abc': must be a sequence"),
        ({"categories": ["a"]}, X, "categories=.*: must be a mapping"),
        ({"classes": [1]}, X, "must be at least two classes"),
        ({"method": "dp_sdg"}, X, "did you mean 'dp_sgd'"),
        ({"sample_rate": 2}, X, "sample_rate=2: must be greater than 0 and at most 1"),
        ({"hidden_layer_sizes": (0,)}, X, "hidden_layer_sizes=0: must be an integer of at least 1"),
        ({"hidden_layer_sizes": 8}, X, "hidden_layer_sizes=8: must be a sequence"),
        ({"categories": {0: {1, 2}}}, X, r"categories\[0\]={1, 2}: must be a sequence of values"),
        ({"delta": 2}, X, "^delta=2: must lie strictly between 0 and 1"),
        ({"target_epsilon": -1}, X, "target_epsilon=-1: must be greater than 0"),
    ],
)
def test_nonsense_is_one_sentence(options: dict[str, Any], table: Any, words: str):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words) as refused:
        PrivateClassifier(**{**QUICK, **options}).fit(table, Y)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("sampling", ["fixed_order", "shuffled", "fixed-size"])
def test_a_share_of_the_rows_is_rounded_for_batches_of_a_fixed_size(sampling: str):
    X, y = np.zeros((13, 2)), np.arange(13) % 2
    fitted = PrivateClassifier(classes=[0, 1], sampling=sampling, **{**SHORT, "epochs": 0.25}).fit(X, y)
    assert fitted.statement_.sampler["expected_batch_size"] == 3  # of 13 / 4
    assert fitted.set_params(sample_rate=0.01, epochs=0.01).fit(X, y).statement_.sampler["expected_batch_size"] == 1


@pytest.mark.parametrize(
    ("options", "words"), [({"bounds": (1, 0)}, "low < high"), ({"classes": None}, "classes="), ({"lr": -1.0}, "lr=")]
)
def test_a_fit_that_fails_leaves_nothing_of_another(options: dict[str, Any], words: str):
    estimator = PrivateClassifier(**QUICK).fit(X, Y)
    with pytest.raises(ArgumentError, match=words):
        estimator.set_params(**options).fit(X, Y)
    with pytest.raises(NotFittedError):
        estimator.predict(X)
    assert not {"model_", "classes_", "epsilon_", "statement_"} & vars(estimator).keys()


@pytest.mark.parametrize(
    ("table", "targets", "words"),
    [
        (X, ["0.5"] * 39 + ["secret"], "y: has texts that are no numbers"),
        (X, np.array([0.5] * 39 + ["secret"], dtype=object), "y: has texts that are no numbers"),
        (X, DATES[:, 0], "y: has dates or times"),
        (X, Y + 0.75j, "y: Complex data not supported"),
        (X + 0.75j, Y, "X: Complex data not supported"),
    ],
)
def test_no_error_shows_a_target_or_a_value(table: Any, targets: Any, words: str):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words) as refused:
        PrivateRegressor(target_bounds=(0, 1)).fit(table, targets)
    assert not {"secret", "75"} & set(re.split(r"\W+", str(refused.value)))
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_the_page_has_the_recorded_figures():
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/tables.md").read_text()
    found = json.loads((root / "docs/results/tables.json").read_text())["accuracy"]
    for epsilon in (1, 3, 10):
        ours = found[f"dpcore, epsilon {epsilon}"]
        theirs = max(found[f"diffprivlib, epsilon {epsilon}, C {c}"]["mean"] for c in (0.01, 0.1, 1, 10, 100))
        assert f"{ours['mean']:.3f} ± {ours['half_width']:.3f} at" in page
        assert f"{theirs:.3f}" in page
    assert f"{found['scikit-learn, not private']['mean']:.3f} without privacy" in page


def test_without_scikit_learn_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, scikit_learn.__name__)
    with pytest.raises(MissingPackageError, match=r"pip install 'dpcore\[sklearn\]'"):
        import_module(scikit_learn.__name__)
