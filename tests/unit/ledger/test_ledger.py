"""What a ledger grants, and how runs go on from checkpoints."""

import itertools
import os
import stat
from pathlib import Path

import pytest

from dpcore.accounting import Adjacency, FixedSizeSampledGaussian, Gaussian, NonPrivate, PoissonSampledGaussian, epsilon
from dpcore.accounting.gaussian import analytic_noise_multiplier
from dpcore.errors import ArgumentError, ArgumentTypeError, BudgetError, DataError, PrivacyError
from dpcore.ledger import Ledger, Total
from dpcore.ledger.allowance import Blocks, largest
from tests.refused import refused
from tests.unit.ledger_tools import begin, full, new, ordered, poisson, released, restored


@pytest.fixture(autouse=True)
def _even_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks whenever it is looked at: blocks grow as on an idle machine, however busy this one is."""
    ticks = itertools.count()
    monkeypatch.setattr(Blocks.__init__, "__defaults__", (lambda: float(next(ticks)),))


def test_an_empty_ledger_has_spent_nothing(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(3, 1e-5), name="patients")
    total = ledger.total()
    assert (total.fixed, total.filter, total.odometer, total.spent, total.runs) == (0.0, 0.0, 0.0, 0.0, 0)
    assert 3 * (1 - 1e-12) < total.budget <= 3
    assert (ledger.runs(), ledger.verify().valid, len(ledger.salt)) == ((), True, 32)
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["people.ledger"]
    again = Ledger.open(ledger.path)
    assert (again.name, again.budget, again.ledger_id) == ("patients", (3.0, 1e-5), ledger.ledger_id)
    assert (again.salt, again.seal) == (ledger.salt, ledger.seal)


def test_rows_are_on_disk_before_they_are_granted(tmp_path: Path) -> None:
    run = begin(ledger := new(tmp_path))
    for row in range(300):
        run.reserve(row)
        (held,) = Ledger.open(ledger.path).runs()
        assert row < held.releases == run.mark <= row + largest(1000)
        assert held.event == poisson(held.releases)


def test_never_beyond_the_plan(tmp_path: Path) -> None:
    released(run := begin(new(tmp_path), steps=37), 37)
    assert run.mark == 37
    refused(PrivacyError, "planned for 37 rows", run.reserve, 37)


def test_close_gives_the_rest_back(tmp_path: Path) -> None:
    run = begin(ledger := new(tmp_path))
    released(run, 300)
    assert run.mark > 300
    refused(ArgumentError, r"row=298: must be at least 299", run.close, 298)
    run.close(300)
    run.close(300)
    assert (run.mark, run.releases) == (300, 300)
    (held,) = ledger.runs()
    assert held.event == poisson(300)
    assert 0 < held.epsilon(1e-5) <= epsilon(poisson(300), 1e-5, "rdp")
    run.reserve(300)  # takes the branch back
    assert run.mark > 300
    run.close(301)
    assert run.releases == 301


def test_a_close_keeps_the_rows_that_another_branch_continued_from(tmp_path: Path) -> None:
    ledger = new(tmp_path)
    run = begin(ledger)
    run.reserve(0)
    ledger.resume(run.run_id, run.branch_id, 30, event_after=poisson)  # its checkpoint came after 30 rows
    run.close(10)
    assert (run.mark, ledger.runs()[0].releases, ledger.verify().valid) == (30, 30, True)
    content = {"kind": "close", "entry": ledger._book.state.entries, "run": run.run_id, "branch": run.branch_id}
    refused(ValueError, "another branch continued from", ledger._book.state.apply, content | {"mark": 29})


def test_blocks_cost_less_than_a_percent() -> None:
    now = [0.0]
    blocks = Blocks(10**4, clock=lambda: now[0])
    row, sizes = 0, []
    for _ in range(12):
        size = blocks.next_size(row)
        sizes.append(size)
        start = now[0]
        now[0] += 0.003  # a write takes 3 ms
        blocks.wrote(row, now[0] - start)
        now[0] += 0.010 * size  # a row takes 10 ms
        row += size
    assert sizes[:3] == [1, 4, 16]
    assert set(sizes[3:]) <= {30, 31}  # 3 ms of 300 ms
    quick = Blocks(10**4, clock=lambda: now[0])
    for number in range(9):
        quick.next_size(number)
        now[0] += 1.0
        quick.wrote(number, 1.0)
        now[0] += 1e-6
    assert quick.next_size(9) == largest(10**4) == 100
    assert [largest(steps) for steps in (1, 1000, 10**6)] == [4, 10, 10**4]


# Every resumption is a branch


def test_a_branch_from_the_mark_costs_nothing(tmp_path: Path) -> None:
    run = begin(ledger := new(tmp_path))
    released(run, 20)
    run.close(20)
    branch, _ = ledger.resume(run.run_id, run.branch_id, 20, event_after=poisson)
    assert (branch.branch_id != run.branch_id, branch.mark, branch.releases) == (True, 20, 20)
    branch.reserve(20)
    branch.close(21)
    assert ledger.runs()[0].event == poisson(21)


def test_rows_behind_the_checkpoint_stay_charged(tmp_path: Path) -> None:
    run = begin(ledger := new(tmp_path), ordered)
    released(run, 50)
    run.close(50)
    branch, number = ledger.resume(run.run_id, run.branch_id, 30, event_after=ordered)
    assert (branch.mark, branch.releases) == (30, 50)
    assert ledger.runs()[0].event == ordered(50)  # nothing new has left yet
    stored = Ledger.open(ledger.path).export()["entries"]
    assert [item["number"] for item in stored if item["kind"] == "fork"] == [number]  # on disk already
    branch.reserve(30)
    assert ledger.runs()[0].event == ordered(branch.mark, ((30, 50),))
    assert branch.releases == branch.mark + 20
    branch.use_key("key of the branch")
    branch.use_key("key of the branch")
    refused(PrivacyError, "has the same noise key", begin, ledger, key_digest="key of the branch")
    refused(ArgumentError, "begins at row 30", ledger.resume, branch.run_id, branch.branch_id, 29, event_after=ordered)


def test_the_plan_is_told_which_rows_were_abandoned(tmp_path: Path) -> None:
    asked = []

    def event_after(steps: int, abandoned: tuple[tuple[int, int], ...]) -> Gaussian:
        asked.append((steps, tuple(abandoned)))
        return full(steps, abandoned)

    run = begin(ledger := new(tmp_path), event_after)
    released(run, 9)
    run.close(9)
    first, _ = ledger.resume(run.run_id, run.branch_id, 4, event_after=event_after)
    first.reserve(4)
    first.close(5)
    back, _ = ledger.resume(run.run_id, run.branch_id, 7, event_after=event_after)  # of the branch that was left
    back.reserve(7)
    assert asked[-1] == (back.mark, ((4, 5), (7, 9)))
    on, _ = ledger.resume(run.run_id, first.branch_id, 5, event_after=event_after)
    on.reserve(5)
    assert asked[-1] == (on.mark, ((4, 9), (7, back.mark)))


def test_an_older_copy_of_the_ledger_pays_for_the_rows_it_lacks(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(3, 1e-5))
    run = begin(ledger, full)
    run.reserve(0)
    run.close(1)
    branch, _ = ledger.resume(run.run_id, run.branch_id, 800, event_after=full)
    assert ledger.runs()[0].releases == 800
    (note,) = (total := ledger.total()).notes
    assert note == "The budget is exceeded: an older copy of the ledger was put back, or rows left without it."
    assert total.filter == max(total.odometer, ledger.filter.epsilon(total.spent, 1e-5)) > 3  # no limit held
    with pytest.raises(BudgetError):
        branch.reserve(800)


def test_what_the_ledger_does_not_know(tmp_path: Path) -> None:
    run = begin(ledger := new(tmp_path))
    other = Ledger.create(tmp_path / "other.ledger")
    with pytest.raises(DataError, match=r"has no run .* it is of another ledger.* begin a new run"):
        other.resume(run.run_id, run.branch_id, 0, event_after=poisson)
    with pytest.raises(DataError, match=r"has no branch .* an older copy"):
        ledger.resume(run.run_id, run.run_id + ".7", 0, event_after=poisson)


def test_another_plan_cannot_recount_the_rows(tmp_path: Path) -> None:
    run = begin(ledger := new(tmp_path))
    released(run, 9)
    for other in (lambda steps, abandoned: poisson(steps, abandoned, 5.0), full):
        with pytest.raises(PrivacyError, match="began under another plan"):
            ledger.resume(run.run_id, run.branch_id, 9, event_after=other)

    branch, _ = ledger.resume(run.run_id, run.branch_id, 9, event_after=poisson, steps=2000)
    branch.reserve(1500)
    with pytest.raises(ArgumentError, match="at least 2000"):
        ledger.resume(run.run_id, run.branch_id, 9, event_after=poisson, steps=1000)


# Budget, adjacency


def test_a_budget_ends_at_the_very_row(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(2.0, 1e-5))
    run = begin(ledger, full)
    run.reserve(0)
    granted = 1 + ledger.remaining().steps(full, 1000)
    released(run, granted)
    refused(BudgetError, r"step \d+ would cross the budget of .*epsilon=2 at delta=1e-05", run.reserve, granted)
    remaining = ledger.remaining()
    assert ledger.filter.charge(full(granted)) <= remaining.limit < ledger.filter.charge(full(granted + 1))
    assert run.mark == run.releases == granted
    for beyond in (lambda: run.reserve(granted), lambda: begin(ledger, full)):  # not even the first row of another
        with pytest.raises(BudgetError):
            beyond()
    assert len(ledger.runs()) == 1
    assert remaining.steps(full, 1000) == 0
    assert ledger.verify().valid


@pytest.mark.parametrize("composition", ["rdp", "gdp"])
def test_so_many_runs_of_an_epsilon_fit(tmp_path: Path, composition: str) -> None:
    ledger = new(tmp_path, budget=(3.0, 1e-5), composition=composition)
    one = Gaussian(analytic_noise_multiplier(1.0, 1e-5))
    ledger.charge(one, name="the first one")
    fit = ledger.remaining().runs(1.0)
    assert 2 < fit < 9
    for _ in range(fit):
        ledger.charge(one, name="one more")
    assert ledger.remaining().runs(1.0) == 0
    with pytest.raises(BudgetError):
        ledger.charge(one, name="one too many")


def test_what_is_left_calibrates(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(2.0, 1e-5))
    ledger.charge(Gaussian(4.0), name="a count")
    left = ledger.remaining()
    assert left.fits(Gaussian(4.0)) == (ledger.filter.charge(Gaussian(4.0)) <= left.left)
    sigma = left.noise_multiplier(lambda sigma: PoissonSampledGaussian(0.02, sigma, 300))
    steps = left.steps(lambda steps: PoissonSampledGaussian(0.02, 1.0, steps), 10_000)
    for within, beyond in (((sigma, 300), (sigma * (1 - 1e-6), 300)), ((1.0, steps), (1.0, steps + 1))):
        assert left.fits(PoissonSampledGaussian(0.02, *within))
        assert not left.fits(PoissonSampledGaussian(0.02, *beyond))
    ledger.charge(PoissonSampledGaussian(0.02, sigma, 300), name="all of it")
    with pytest.raises(BudgetError):
        ledger.charge(Gaussian(1e3), name="a thousandth more")
    with pytest.raises(BudgetError, match="too little for any noise"):
        ledger.remaining().noise_multiplier(lambda sigma: PoissonSampledGaussian(0.5, min(sigma, 1.0), 3000))


def test_adjacencies(tmp_path: Path) -> None:
    ledger = new(tmp_path)
    begin(ledger, dataset="a").reserve(0)
    begin(ledger, full).reserve(0)
    begin(ledger, dataset="b").reserve(0)
    total = ledger.total(1e-5)
    assert total.adjacency == "zero-out"
    assert "2 different fingerprints" in total.notes[0]
    assert "Add-remove and zero-out runs are mixed" in total.notes[1]
    assert total.spent == pytest.approx(2 * ledger.filter.charge(poisson(1)) + ledger.filter.charge(full(1)))
    with pytest.raises(PrivacyError, match="replace-one does not add up"):
        ledger.charge(Gaussian(5.0, adjacency=Adjacency.REPLACE_ONE), name="x")
    other = Ledger.create(tmp_path / "replace.ledger")
    other.charge(Gaussian(5.0, adjacency=Adjacency.REPLACE_ONE), name="x")
    refused(PrivacyError, "has runs under replace-one", begin, other, poisson)
    other.charge(FixedSizeSampledGaussian(1000, 10, 1.0, 5), name="without replacement")
    assert other.total(1e-5).adjacency == "replace-one"
    refused(ArgumentError, "described under 'zero-out'", begin, ledger, full, adjacency="add-remove")


def test_no_guarantee_is_infinite(tmp_path: Path) -> None:
    ledger = new(tmp_path)
    ledger.charge(NonPrivate("published as it is"), name="a leak")
    total = ledger.total(1e-5)
    assert (total.fixed, total.filter, total.spent) == (float("inf"),) * 3
    assert total.to_dict()["filter"] == "inf"
    assert ledger.verify().valid
    assert Ledger.open(ledger.path).total(1e-5) == total
    with pytest.raises(BudgetError):
        Ledger.create(tmp_path / "b", budget=(3, 1e-5)).charge(NonPrivate("x"), name="a leak")


def test_nonsense(tmp_path: Path) -> None:
    refused(ArgumentTypeError, r"storage='x.ledger': open a ledger with Ledger.open\(path\)", Ledger, "x.ledger")
    for budget in ((3, 1e-5, 1), 3, "x"):
        refused(ArgumentTypeError, r"must be \(epsilon, delta\)|must be a real number", new, tmp_path, budget=budget)
    for match, options in (
        *(("budget_", {"budget": budget}) for budget in ((0, 1e-5), (-1, 1e-5), (3, 0), (3, 1), (float("nan"), 1e-5))),
        (r"order=1\.0: must be greater than 1", {"order": 1.0}),
        (r"order=1.1: leaves nothing to spend .* the best is", {"order": 1.1, "budget": (1, 1e-5)}),
        ("composition='pld'", {"composition": "pld"}),
        ("only composition='rdp' has an order", {"composition": "gdp", "order": 3}),
    ):
        refused(ArgumentError, match, new, tmp_path, **options)
    assert os.listdir(tmp_path) == []
    ledger = new(tmp_path)
    for kind, match, use in (
        (ArgumentError, "delta=None", ledger.total),
        (ArgumentError, "budget=None", ledger.remaining),
        (ArgumentError, "description: must be made of", lambda: begin(ledger, description={"lr": float("nan")})),
        (ArgumentTypeError, "must be an event", lambda: begin(ledger, lambda *_: 3, adjacency="zero-out")),
        (ArgumentTypeError, "event=", lambda: ledger.charge("x", name="x")),
        (ArgumentError, "adjacency=", lambda: begin(ledger, adjacency="add-remov")),
        (ArgumentError, "left=1001: must be at most the planned steps, 1000", lambda: begin(ledger, left=1001)),
        (ArgumentError, "left=-1", lambda: begin(ledger, left=-1)),
        (ArgumentError, r"abandoned: \(7, 3\) must be", lambda: begin(ledger, left=5, abandoned=[(7, 3)])),
        (ArgumentError, r"abandoned: \(3, 1001\) must be", lambda: begin(ledger, left=5, abandoned=[(3, 1001)])),
        (ArgumentError, "has None, fixed when", lambda: Ledger.open_or_create(ledger.path, budget=(3, 1e-5))),
    ):
        refused(kind, match, use)
    assert ledger.runs() == ()  # nothing of this was written
    assert Ledger.open_or_create(ledger.path).ledger_id == ledger.ledger_id
    assert isinstance(Ledger.open_or_create(tmp_path / "new", budget=(3, 1e-5)).total(), Total)

    with pytest.raises(ArgumentError, match="row=-1"):
        begin(ledger).reserve(-1)
    with pytest.raises(PrivacyError, match="does not cover secretly sampled"):
        begin(Ledger.create(tmp_path / "gdp", composition="gdp"))


def test_a_script_that_makes_its_ledger_runs_twice(tmp_path: Path) -> None:
    path = tmp_path / "people.ledger"
    first = Ledger.open_or_create(path, budget=(3.0, 1e-5), name="people")
    first.charge(Gaussian(9.0), name="a count")
    again = Ledger.open_or_create(path, budget=(3.0, 1e-5), name="people")
    assert again.ledger_id == first.ledger_id
    assert [run.name for run in again.runs()] == ["a count"]
    assert again.name == "people"
    with pytest.raises(ArgumentError, match=r"^budget=\(4.0, 1e-05\): the ledger .* has \(3.0, 1e-05\), fixed when"):
        Ledger.open_or_create(path, budget=(4.0, 1e-5))
    with pytest.raises(ArgumentError, match=r"^name='others': the ledger .* has 'people', fixed when"):
        Ledger.open_or_create(path, name="others")
    assert Ledger.open_or_create(path).ledger_id == first.ledger_id


def test_a_ledger_as_it_was_at_a_seal(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(8.0, 1e-5))
    stated = [ledger.describe(ledger.charge(Gaussian(sigma), name="a count"), 1e-5) for sigma in (9.0, 5.0)]
    for one, sigmas in zip(stated, ([9.0], [9.0, 5.0]), strict=True):
        before = ledger.at(one["seal"])
        assert [run.event for run in before.runs()] == [Gaussian(sigma) for sigma in sigmas]
        total = before.total(1e-5)
        assert one["total"] == {"epsilon": total.filter, "epsilon_if_fixed_beforehand": total.fixed, "delta": 1e-5}
        assert (before.seal, before.total(1e-5)) == (one["seal"], total)
    refused(DataError, "no entry has the seal abc", ledger.at, "abc")
    with pytest.raises(DataError, match="read only"):
        ledger.at(ledger.seal).charge(Gaussian(9.0), name="late")


def test_what_was_released_already_is_written_down_and_leaves_no_budget(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(3, 1e-5))
    ledger.charge(full(1), name="a count")
    seen = Gaussian(0.5)
    with pytest.raises(BudgetError):
        ledger.charge(seen, name="a table")
    assert len(ledger.runs()) == 1
    run_id = ledger.charge(seen, name="a table", already_released=True)
    record = ledger.runs()[1]
    assert (record.run_id, record.event, record.releases) == (run_id, seen, 1)
    total = ledger.total()
    assert total.spent > total.limit
    assert total.budget > 3
    assert total.odometer >= epsilon(seen, 1e-5)
    assert any("exceeded" in note for note in total.notes)
    with pytest.raises(BudgetError):
        ledger.charge(Gaussian(1e6, adjacency=Adjacency.ZERO_OUT), name="anything")
    # Another process, which replays the entries, grants nothing either; the check says what is wrong, and only that.
    again = Ledger.open(ledger.path)
    with pytest.raises(BudgetError):
        begin(again)
    (problem,) = again.verify().problems
    assert "the budget is exceeded" in problem
    assert restored(tmp_path / "again", again.export()).runs() == again.runs()


def test_a_release_beside_plans_that_keep_the_budget_ends_them(tmp_path: Path) -> None:
    """Rows of plans fixed beforehand are within the budget as long as nothing else is released."""
    steps = 4
    noise = next(s / 100 for s in range(50, 2000) if epsilon(full(steps, sigma=s / 100), 1e-5) <= 3)
    run = begin(ledger := new(tmp_path, budget=(3, 1e-5)), lambda n, left: full(n, left, noise), steps=steps)
    run.reserve(0)
    assert ledger.total().alone
    ledger.charge(full(1), name="a count", already_released=True)
    with pytest.raises(BudgetError):
        run.reserve(run.mark)
    assert any("exceeded" in note for note in ledger.total().notes)
