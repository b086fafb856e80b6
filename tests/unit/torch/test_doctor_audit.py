"""The audit of a torch run: an honest run passes, and the same run with something broken is told apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dpcore import methods
from dpcore.mechanism.mechanism import Mechanism
from dpcore.torch import assemble, doctor
from dpcore.torch.doctor import canaries
from tests.unit.torch.doctor_models import mlp, numbers


class Halved(Mechanism):
    """Adds half of the noise that its plan says."""

    def _take(self, *arguments):
        plan = self.plan
        self.plan = replace(plan, method=plan.method.with_noise_multiplier(plan.noise_multiplier / 2))
        try:
            super()._take(*arguments)
        finally:
            self.plan = plan


class Unclipped(Mechanism):
    """Clips to four times the norm that its plan says."""

    def _add(self, blocks):
        plan = self.plan
        clip = replace(plan.method.clip, max_grad_norm=4.0)
        self.plan = replace(plan, method=replace(plan.method, clip=clip))
        try:
            super()._add(blocks)
        finally:
            self.plan = plan


METHODS = {
    "dp_sgd": methods.dp_sgd(lr=0.5, noise_multiplier=1.0, batch_size=6),
    "disk": methods.disk(lr=0.5, noise_multiplier=1.0, batch_size=6),
    "adam, by layer": methods.dp_adam(lr=0.1, noise_multiplier=1.0, batch_size=6, clipping_groups="per_layer"),
}


def audited(method, model=None, **more):
    torch.manual_seed(0)
    options = {"steps": 40, "seconds": 600.0, "target_delta": 1e-5, **more}
    (finding,) = doctor(model or mlp(), numbers(), method, **options).named("audit")
    return finding


@pytest.mark.parametrize("name", ["dp_sgd", pytest.param("disk", marks=pytest.mark.slow), "adam, by layer"])
def test_an_honest_run_passes_and_half_of_its_noise_is_refuted(name):
    finding = audited(METHODS[name])
    assert finding.status == "ok", finding
    found = finding.details
    assert found["half_refuted"]
    assert not found["flagged"]
    assert 0 < found["lower_bound"] < found["claimed_epsilon"]
    assert 0.45 < found["ratio"] < 1


@pytest.mark.parametrize("name", METHODS)
def test_the_same_run_with_its_noise_halved_is_refuted_by_the_canaries_alone(monkeypatch, name):
    """At the stated confidence, in one run: the bound exceeds the claim, whatever the direct checks say."""
    monkeypatch.setattr(assemble, "Mechanism", Halved)
    finding = audited(METHODS[name])
    assert finding.status == "fault"
    found = finding.details
    assert found["ratio"] > 1
    assert found["lower_bound"] > found["claimed_epsilon"]
    assert found["findings"][0].startswith("Canaries were told apart")
    assert found["p_values"]["noise"] < 1e-6


def test_a_clip_norm_four_times_too_large_is_refuted(monkeypatch):
    monkeypatch.setattr(assemble, "Mechanism", Unclipped)
    finding = audited(METHODS["dp_sgd"])
    assert finding.status == "fault"
    assert finding.details["ratio"] > 1


@pytest.mark.slow
def test_correlated_noise_is_audited_too(monkeypatch):
    method = methods.memf(lr=0.1, noise_multiplier=1.0, batch_size=6)
    options = {"sampling": "fixed-order", "steps": 16}
    assert not audited(method, **options).details["flagged"]
    monkeypatch.setattr(assemble, "Mechanism", Halved)
    assert audited(method, **options).details["ratio"] > 1


def test_dropout_is_off_for_the_canaries():
    finding = audited(METHODS["dp_sgd"], mlp(nn.Dropout(0.5)), seconds=6.0)
    assert finding.status in ("ok", "remark")


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        (methods.dp_sgd(lr=0.1, noise_multiplier=0.0, batch_size=6), {}, "no noise"),
        (methods.dp_adam(lr=0.1, noise_multiplier=1.0, batch_size=6, variant="scale_then_privatize"), {}, "scaled"),
    ],
)
def test_what_canaries_cannot_show_is_said(method, options, told):
    finding = audited(method, **options)
    assert finding.status == "not tried"
    assert told in finding.sentence


def test_clipped_vectors_are_those_of_the_formula():
    """By autograd and numpy, one example at a time: gradient times min(1, C / norm)."""
    from dpcore.torch import make_private

    torch.manual_seed(0)
    model, (inputs, labels) = mlp(), numbers()
    run = make_private(model, (inputs, labels), METHODS["dp_sgd"], steps=3)
    found = canaries.clipped_vectors(run, (inputs[:4], labels[:4]))
    for i in range(4):
        loss = torch.nn.functional.cross_entropy(model(inputs[i : i + 1]), labels[i : i + 1])
        flat = np.concatenate(
            [g.reshape(-1).double().numpy() for g in torch.autograd.grad(loss, list(model.parameters()))]
        )
        np.testing.assert_allclose(found[i], flat * min(1.0, 1.0 / np.linalg.norm(flat)), rtol=1e-4, atol=1e-7)


def test_canaries_are_chosen_apart():
    vectors = np.array([[1.0, 0, 0], [0.99, 0.1, 0], [0, 1, 0], [0, 0, 0.1], [np.nan, 0, 0]])
    assert canaries.apart(vectors @ vectors.T, 4).tolist() == [0, 2]


def test_canaries_that_crowd_each_other_are_left_out():
    """Orthogonal ones tell the more, the more there are; of twelve in a plane's corner two are taken at most."""
    assert canaries.telling(np.eye(8), 1.0) == 8
    close = 0.95 * np.ones((12, 12)) + 0.05 * np.eye(12)
    assert canaries.telling(close, 1.0) == 1


def main() -> None:
    """Print the rows of the table in docs/audit.md."""
    for name, method in METHODS.items():
        for kind, told in ((Mechanism, "as planned"), (Halved, "noise halved")):
            assemble.Mechanism = kind
            found = audited(method).details
            verdict = "refuted" if found["flagged"] else "half the noise refuted" if found["half_refuted"] else "open"
            sizes = (
                f"{found['canaries']} | {found['steps']} | {found['claimed_epsilon']:.2f} | {found['lower_bound']:.2f}"
            )
            print(f"| {name} | {told} | {sizes} | {found['ratio']:.2f} | {verdict} |")  # noqa: T201


if __name__ == "__main__":
    main()
