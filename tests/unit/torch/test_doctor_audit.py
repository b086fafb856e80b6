"""The audit of a torch run: an honest run passes, and the same run with something broken is told apart."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from dpcore.clipping import AdaptiveClip
from torch import nn

from dpcore import GaLore, Plan, methods
from dpcore.accounting.gaussian import gaussian_epsilon
from dpcore.mechanism import loop
from dpcore.mechanism.mechanism import Mechanism
from dpcore.sampling import FixedOrderSampler, PoissonSampler, UserSampler
from dpcore.torch import doctor, make_private
from dpcore.torch.doctor import audit_run
from dpcore.torch.doctor.audit_run import add_up, take
from tests.depth import chosen
from tests.unit.torch.doctor_models import mlp, numbers

MADE = importlib.import_module("dpcore.torch.make_private")


class OtherNoise(Mechanism):
    """Adds the noise of another plan to its sums."""

    def other(self, plan):
        raise NotImplementedError

    def _take(self, slots, row, unit, *rest):
        plan = self.plan
        self.plan = self.other(plan)
        try:
            own = self._unit(row)
            super()._take([slot._replace(total=slot.total * (unit / own)) for slot in slots], row, own, *rest)
        finally:
            self.plan = plan


class Halved(OtherNoise):
    """Adds half of the noise that its plan says."""

    def other(self, plan):
        return replace(plan, method=plan.method.with_noise_multiplier(plan.noise_multiplier / 2))


class Unclipped(Mechanism):
    """Clips to four times the norm that its plan says."""

    _claimed = None

    @property
    def unit(self):
        return super().unit if self._claimed is None else self._claimed

    def _add(self, blocks):
        plan, self._claimed = self.plan, self.unit
        clip = replace(plan.method.clip, max_grad_norm=4 * plan.method.clip.max_grad_norm)
        self.plan = replace(plan, method=replace(plan.method, clip=clip))
        try:
            super()._add(blocks)
        finally:
            self.plan, self._claimed = plan, None


class Unscaled(OtherNoise):
    """Adds noise for the clip norm of plain gradients where they are scaled and clipped to another one."""

    def other(self, plan):
        query = replace(plan.method.query, max_scaled_norm=None)
        return replace(plan, method=replace(plan.method, query=query))


SETTINGS = {"noise_multiplier": 1.0, "batch_size": 6}
IN_ORDER = {"sampling": "fixed-order", "steps": 16}
DELAYED = {"variant": "delayed_preconditioner", "unscaled_steps": 3, "scaled_steps": 2, "max_scaled_norm": 2.0}
USERS = UserSampler(PoissonSampler(dataset_size=12, batch_size=6), np.arange(24) % 12, 2)
METHODS = {
    "dp_sgd": (methods.dp_sgd(lr=0.5, **SETTINGS), {}),
    "disk": (methods.disk(lr=0.5, **SETTINGS), {}),
    "disk, far points": (methods.disk(lr=20.0, **SETTINGS), {}),
    "adam, by layer": (methods.dp_adam(lr=0.1, clipping_groups="per_layer", **SETTINGS), {}),
    "adam, scaled": (methods.dp_adam(lr=0.1, variant="scale_then_privatize", **SETTINGS), {}),
    "adam, scaled at times": (methods.dp_adam(lr=0.1, **DELAYED, **SETTINGS), {}),
    "galore": (methods.doppler(lr=0.1, base="adam", galore=GaLore(rank=2, every=3), **SETTINGS), {}),
    "users": (methods.dp_sgd(lr=0.5, **SETTINGS), {"sampling": USERS}),
    "memf": (methods.memf(lr=0.1, **SETTINGS), IN_ORDER),
    "srg_memf": (methods.srg_memf(lr=0.1, **SETTINGS), IN_ORDER),
    "pmlf": (methods.pmlf(lr=0.1, filter="none", strategy="tree", **SETTINGS), IN_ORDER),
    "disk, correlated": (methods.disk(lr=0.5, strategy="tree", **SETTINGS), IN_ORDER),
}


def audited(name, model=None, **more):
    torch.manual_seed(0)
    method, own = METHODS[name] if isinstance(name, str) else (name, {})
    options = {"steps": 40, "seconds": 600.0, "target_delta": 1e-5, **own, **more}
    (finding,) = doctor(model or mlp(), numbers(), method, **options).named("audit")
    return finding


def refuting(name, model=None, **more):
    """Return the first of five audits that refutes, or the last one.

    Each has fresh keys and sees a fault with some probability.
    An honest run is refuted by none of five but with five times the stated probability.
    """
    for _ in range(5):
        finding = audited(name, model, **more)
        if finding.status == "fault" and finding.details["ratio"] > 1:
            break
    return finding


@pytest.mark.parametrize("name", chosen(["adam, scaled", "users", "memf"], list(METHODS)))
def test_an_honest_run_passes_and_half_of_its_noise_is_refuted(name):
    finding = audited(name)
    assert finding.status == "ok", finding
    found = finding.details
    assert found["half_refuted"]
    assert not found["flagged"]
    assert 0 < found["lower_bound"] < found["claimed_epsilon"]
    assert 0.45 < found["ratio"] < 1


@pytest.mark.parametrize("name", chosen(["disk, far points", "memf"], list(METHODS)))
def test_the_same_run_with_its_noise_halved_is_refuted_by_the_canaries_alone(monkeypatch, name):
    """At the stated confidence, in one run: the bound exceeds the claim, whatever the direct checks say."""
    monkeypatch.setattr(MADE, "Mechanism", Halved)
    finding = audited(name)
    assert finding.status == "fault"
    found = finding.details
    assert found["ratio"] > 1
    assert found["lower_bound"] > found["claimed_epsilon"]
    assert found["findings"][0].startswith("Canaries were recognized")
    assert found["p_values"]["noise"] < 1e-6


def test_a_clip_norm_four_times_too_large_is_flagged(monkeypatch):
    """By canaries, and by sums that are not what their vectors add up to: gradients are longer than four norms."""
    monkeypatch.setattr(MADE, "Mechanism", Unclipped)
    finding = audited(methods.dp_sgd(lr=0.5, max_grad_norm=0.25, **SETTINGS))
    assert finding.status == "fault"
    assert finding.details["flagged"]
    assert finding.details["p_values"]["sums"] < 1e-6


def test_noise_for_another_norm_than_that_of_scaled_gradients_is_refuted(monkeypatch):
    """Two steps of five have half the noise: by the canaries, and in the eight first steps by the noise itself."""
    monkeypatch.setattr(MADE, "Mechanism", Unscaled)
    found = audited("adam, scaled at times", seconds=20.0).details
    assert found["flagged"]
    assert found["p_values"]["noise"] < 1e-3


def test_each_example_of_a_user_clipped_alone_is_refuted(monkeypatch):
    """A canary's two examples then add up to two clip norms."""
    monkeypatch.setattr(loop, "of_units", lambda blocks, sizes: [blocks])
    assert refuting("users").details["ratio"] > 1


def test_points_clipped_one_by_one_are_refuted(monkeypatch):
    """A canary's two vectors then add up to two clip norms."""

    def apart(self, parameters, blocks_at, count, public=None):
        mechanism = self.mechanism
        mechanism.discard()
        for point in mechanism.points():
            blocks = blocks_at(mechanism.at(parameters, point), point)(slice(0, count))
            mechanism.add([block.weighted(point.weight) for block in blocks])
        mechanism.join()

    monkeypatch.setattr(loop.Loop, "sum_clipped", apart)
    method = methods.disk(lr=0.5, max_grad_norm=0.05, **SETTINGS)  # short, so that each vector is clipped
    assert refuting(method).details["ratio"] > 1


@pytest.mark.parametrize("ratio", [1e-3, 0.5, 1.0, 3.0])
def test_the_bound_takes_what_is_released_beside_gradients_as_planned(ratio):
    order, whole = FixedOrderSampler(dataset_size=6, batch_size=6), {"lr": 0.1, **SETTINGS}
    bits = Plan(methods.dp_sgd(adaptive_clip=AdaptiveClip(bit_noise_std=0.6), **whole), order, 1)
    squares = Plan(methods.dp_adam(variant="independent_moments", **whole), order, 1)
    for plan, gradients, others in ((bits, 1 / bits.gradient_noise_multiplier, 1 / 1.2), (squares, 0.5**0.5, 0.5**0.5)):
        exact = gaussian_epsilon(np.hypot(ratio * gradients, others), 1e-5)
        assert audit_run._epsilon_at(plan, ratio, 1e-5) == pytest.approx(exact, rel=1e-6)
    assert audit_run._epsilon_at(Plan(methods.dp_sgd(**whole), order, 1), ratio, 1e-5) == pytest.approx(
        gaussian_epsilon(ratio, 1e-5), rel=1e-6
    )


def test_dropout_is_off_for_the_canaries():
    finding = audited("dp_sgd", mlp(nn.Dropout(0.5)), seconds=6.0)
    assert finding.status in ("ok", "remark")
    assert finding.private


def test_what_canaries_cannot_show_is_said():
    finding = audited(methods.dp_sgd(lr=0.1, noise_multiplier=0.0, batch_size=6))
    assert finding.status == "not tried"
    assert "no noise" in finding.sentence
    finding = audited(methods.dp_sgd(lr=0.1, noise_multiplier=1e-5, batch_size=6))
    assert finding.status == "not tried"
    assert "rounding is not small" in finding.sentence


def test_a_run_under_correlated_noise_begins_anew_where_its_noise_would_not_fit(monkeypatch):
    """Rows are those of the leading block, whose noise is that of the whole run."""
    monkeypatch.setattr(audit_run, "_NUMBERS", 500)
    begun = []
    true = audit_run._Audit._begin
    monkeypatch.setattr(audit_run._Audit, "_begin", lambda self: (begun.append(1), true(self)))
    found = audited("memf", seconds=2.0).details
    assert not found["flagged"]
    assert len(begun) == -(-found["steps"] // (500 // 83))  # numbers of the model


def test_clipped_vectors_are_those_of_the_formula():
    """By autograd and numpy, one example at a time: gradient times min(1, C / norm)."""
    torch.manual_seed(0)
    model, (inputs, labels) = mlp(), numbers()
    run = make_private(model, (inputs, labels), METHODS["dp_sgd"][0], steps=3)
    found = audit_run.clipped_vectors(run, (inputs[:4], labels[:4]))
    for i in range(4):
        loss = torch.nn.functional.cross_entropy(model(inputs[i : i + 1]), labels[i : i + 1])
        flat = np.concatenate(
            [g.reshape(-1).double().numpy() for g in torch.autograd.grad(loss, list(model.parameters()))]
        )
        np.testing.assert_allclose(found[i], flat * min(1.0, 1.0 / np.linalg.norm(flat)), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "name", ["adam, by layer", "disk, correlated", "adam, scaled at times", "galore", "users", "srg_memf"]
)
def test_what_canaries_are_known_to_add_is_what_the_run_sums(name):
    """In the midst of a run, of all of them together; scales, points and users as they are by then."""
    torch.manual_seed(0)
    method, options = METHODS[name]
    model, (inputs, labels) = mlp(), numbers()
    run = make_private(model, (inputs, labels), method, **{"steps": 40, **options})
    each = 2 if name == "users" else 1
    rows = inputs[:6].repeat_interleave(each, 0), labels[:6].repeat_interleave(each, 0)
    for _ in range(3 if name == "adam, scaled at times" else 4):
        take(run, rows, each=each)
    known = audit_run.clipped_vectors(run, (inputs[:6], labels[:6]), each).sum(axis=0)
    add_up(run, rows, each=each)
    np.testing.assert_allclose(run.engine.mechanism.summed(), known, rtol=1e-3, atol=1e-4)
    assert np.linalg.norm(known) > 0.1


def test_canaries_are_chosen_apart():
    vectors = np.array([[1.0, 0, 0], [0.99, 0.1, 0], [0, 1, 0], [0, 0, 0.1], [np.nan, 0, 0]])
    assert audit_run.apart(vectors @ vectors.T, 4).tolist() == [0, 2]


def main() -> None:
    """Print the rows of the table in docs/audit.md."""
    for name in METHODS:
        for kind, told in ((Mechanism, "as planned"), (Halved, "noise halved")):
            MADE.Mechanism = kind
            found = audited(name).details
            verdict = "refuted" if found["flagged"] else "half the noise refuted" if found["half_refuted"] else "open"
            sizes = (
                f"{found['canaries']} | {found['steps']} | {found['claimed_epsilon']:.2f} | {found['lower_bound']:.2f}"
            )
            print(f"| {name} | {told} | {sizes} | {found['ratio']:.2f} | {verdict} |")  # noqa: T201


if __name__ == "__main__":
    main()
