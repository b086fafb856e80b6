"""A loss of each example over several models: its steps are those of explicit autograd, and all else is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpcore
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.torch import HeldOut, JointLoss, PrivateRun, doctor, make_private
from dpcore.torch.gradients.per_example import WAYS
from dpcore.torch.peers import gradient_of
from tests.refused import refused
from tests.unit.torch_runs import DATA, KEY, METHODS, load, saved, sgd, start


class Game:
    """A critic of inputs and made-up ones, a classifier that shares its first layer, and a generator."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.critic = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
        self.classifier = nn.Sequential(self.critic[0], nn.Tanh(), nn.Linear(6, 3))
        self.generator = nn.Linear(3, 5)
        self.joint = JointLoss(self.losses, [self.critic, self.classifier], [self.generator])
        self.trained = [*self.critic.parameters(), *self.classifier[2].parameters()]

    def losses(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        made = self.generator(F.one_hot(labels, 3).to(inputs.dtype))
        adversarial = F.softplus(-self.critic(inputs)) + F.softplus(self.critic(made))
        return adversarial[:, 0] + 0.5 * F.cross_entropy(self.classifier(inputs), labels, reduction="none")

    def play(self) -> torch.Tensor:
        """Take a step of the generator through the critic, as in any such game; the critic's ``grad`` is left."""
        loss = F.softplus(-self.critic(self.generator(torch.eye(3)))).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self.generator.parameters():
                parameter -= 0.3 * parameter.grad  # type: ignore[operator]
        return loss.detach()


def clipped_mean(game: Game, batch: Any, clip: float) -> tuple[list[torch.Tensor], list[float]]:
    """The definition: one backward pass and one clip for each example, over all trained parameters together."""
    sums, norms = [torch.zeros_like(p) for p in game.trained], []
    for i in range(len(batch[0])):
        loss = game.losses(batch[0][i : i + 1], batch[1][i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, game.trained)
        norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, clip / norms[-1])
    return [total / 8 for total in sums], norms


@pytest.mark.parametrize("way", WAYS)
def test_a_game_of_three_models_takes_the_steps_of_explicit_autograd(way: str) -> None:
    game = Game()
    method = sgd(lr=0.4, noise_multiplier=0.0, max_grad_norm=0.8, clipping="standard")
    run = start(game.joint, method, sampling="fixed_order", gradients=way)
    public, norms = torch.optim.SGD(game.critic.parameters(), lr=0.1), []
    for batch in run.loader:
        means, found = clipped_mean(game, batch, 0.8)
        norms += found
        before = [p.detach().clone() for p in game.trained]
        made = [p.detach().clone() for p in game.generator.parameters()]
        run.step(batch)
        for parameter, value, mean in zip(game.trained, before, means, strict=True):
            torch.testing.assert_close(parameter.detach(), value - 0.4 * mean, rtol=1e-4, atol=2e-6)
        assert all(map(torch.equal, game.generator.parameters(), made))
        game.play()
        public.step()  # of the critic, on made-up examples: what the generator's pass left in its grad
    assert run.engine.gradient.way == way
    assert min(norms) < 0.8 < max(norms)
    assert run.steps_taken == 4


def test_a_private_step_neither_reads_nor_writes_grad() -> None:
    ends = []
    for left in (False, True):
        game = Game()
        run = start(game.joint)
        for batch in run.loader:
            if left:
                game.critic(torch.randn(9, 5)).sum().backward()
            kept = [None if p.grad is None else p.grad.clone() for p in game.joint.parameters()]
            run.step(batch)
            for parameter, grad in zip(game.joint.parameters(), kept, strict=True):
                assert grad is parameter.grad is None or torch.equal(grad, parameter.grad)  # type: ignore[arg-type]
        ends.append(torch.cat([p.detach().flatten() for p in game.trained]))
    assert torch.equal(*ends)


def test_a_game_goes_on_where_it_was_saved() -> None:
    """With the held models, which other optimizers have moved."""

    def played(run: PrivateRun, game: Game, stop: int) -> None:
        for batch in run.loader:
            if run.steps_taken == stop:
                return
            run.step(batch)
            game.joint.zero_grad()  # which is not saved
            game.play()

    whole, half, again = Game(), Game(), Game()
    run, before, after = (start(game.joint, METHODS["adam"](8), key=KEY) for game in (whole, half, again))
    played(run, whole, 4)
    played(before, half, 2)
    with torch.no_grad():
        again.generator.weight.zero_()
    load(after, saved(before))
    assert torch.equal(again.generator.weight, half.generator.weight)
    played(after, again, 4)
    assert run.steps_taken == after.steps_taken == 4
    assert all(map(torch.equal, whole.joint.parameters(), again.joint.parameters()))


def test_each_example_has_made_up_ones_of_its_own_at_every_step() -> None:
    net = nn.Linear(1, 1, bias=False)
    joint = JointLoss(lambda inputs: net(torch.randn(len(inputs), 1)), [net])  # whose gradient is the draw
    run = start(joint, sgd(noise_multiplier=0.0), data=DATA[0])
    batch, point = DATA[0][:6], run.engine.gradient.parameters()
    rows = [run.engine.gradient(point, batch, bytes([seed]))[0].rows() for seed in (1, 2)]
    assert len(torch.cat(rows).unique()) == 12


def game_with(**other: Any) -> JointLoss:
    """The game with another function or other models."""
    game = Game()
    given = {"losses": game.losses, "trained": [game.critic, game.classifier], "held": [game.generator]}
    given |= {name: value(game) if isinstance(value, Called) else value for name, value in other.items()}
    return JointLoss(**given)


class Called:
    def __init__(self, function: Callable[[Game], Any]) -> None:
        self.function = function

    def __call__(self, game: Game) -> Any:
        return self.function(game)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mean over the batch": (
        {"losses": Called(lambda g: lambda *b: g.losses(*b).mean())}, r"losses: returned shape \(\) for \d+ examples"),
    "every pair of examples": (
        {"losses": Called(lambda g: lambda *b: g.critic(b[0]) + g.losses(*b))}, r"keep \(B, 1\) and \(B,\) apart"),
    "no tensor": ({"losses": lambda *_: 0.0}, "returned float"),
    "examples that meet": (
        {"losses": Called(lambda g: lambda x, y: g.losses(x - x.mean(0), y))}, r"mean.*test_joint"),
    "a generator that is left out": ({"held": ()}, r"shape \(5, 3\).*those of a JointLoss in trained or held"),
    "nothing to train": ({"trained": []}, r"trained=\[\]: must have"),
    "a model for a list": ({"held": nn.Linear(1, 1)}, "held='Linear': must be a list"),
    "no function": ({"losses": None}, "losses=None: must be a function"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_proved_is_refused(name: str) -> None:
    other, words = REFUSED[name]
    kind = ArgumentTypeError if "must be a" in words else ArgumentError
    refused(kind, words, lambda: start(game_with(**other)))


def test_a_joint_loss_is_the_model_itself_and_has_the_loss() -> None:
    refused(ArgumentError, "loss: must be left out with a JointLoss", start, Game().joint, loss=F.mse_loss)
    refused(ArgumentError, "'Sequential' with a JointLoss in it", start, nn.Sequential(Game().joint))
    shards: Any = SimpleNamespace(shards=True)
    refused(ArgumentError, "leave out fully_shard", gradient_of, Game().joint, torch.mean, shards, sgd(), "auto")


def test_fields_of_a_mapping_come_by_name() -> None:
    game, ends = Game(), []
    fields = JointLoss(lambda label, x: game.losses(x, label), [game.critic, game.classifier], [game.generator])
    for joint, data in ((game.joint, DATA), (fields, {"x": DATA[0], "label": DATA[1]})):
        run = start(joint, data=data)
        batch = dict(zip(("x", "label"), DATA, strict=True)) if joint is fields else DATA
        blocks = run.engine.gradient(run.engine.gradient.parameters(), batch, bytes(1))
        ends.append(torch.cat([block.rows() for block in blocks], 1))
    assert torch.equal(*ends)


def test_a_weight_may_change_from_step_to_step() -> None:
    net = nn.Linear(5, 1)
    joint = JointLoss(lambda inputs: net(inputs) * joint.weight, [net])
    joint.weight = 1.0
    run = start(joint, data=DATA[0])
    point, rows = run.engine.gradient.parameters(), []
    for weight in (1.0, -3.0, 1.0):
        joint.weight = weight
        rows.append(run.engine.gradient(point, DATA[0], bytes(1))[0].rows())
    assert torch.equal(rows[0], rows[2])
    torch.testing.assert_close(rows[1], -3 * rows[0])


def test_two_runs_that_share_a_layer_are_two_releases_in_one_ledger(tmp_path: Any) -> None:
    game, path = Game(), tmp_path / "two.ledger"
    Ledger.create(path, budget=(9.0, 1e-5))
    net = game.classifier
    classify = JointLoss(lambda x, y: F.cross_entropy(net(x), y, reduction="none"), [net])
    runs = [
        make_private(
            model, DATA, sgd(noise_multiplier=sigma), target_delta=1e-5, steps=3, ledger=path, key=bytes(31) + key
        )
        for model, sigma, key in ((game.joint, 2.0, b"a"), (classify, 3.0, b"b"))
    ]
    loaders = [iter(run.loader) for run in runs]
    for _ in range(3):
        drawn = [next(loader) for loader in loaders]
        with pytest.raises(PrivacyError, match="the batch has"):
            runs[1].step(drawn[0])  # the second release would have no sampling of its own
        for run, batch in zip(runs, drawn, strict=True):
            run.step(batch)
    alone = [run.epsilon() for run in runs]
    both = dpcore.accounting.Composed(tuple(run.event_after(3) for run in runs))
    total = Ledger.open(path).total(1e-5).fixed
    assert max(alone) < total == pytest.approx(dpcore.accounting.smallest_epsilon(both, 1e-5)[0], rel=1e-9)


def test_losses_of_held_out_data_and_the_doctor() -> None:
    game = Game()
    run = start(game.joint)
    held_out = DATA[0][:12] + 0.01, DATA[1][:12].clone()
    metrics = HeldOut(run, held_out, {"loss": torch.mean}).evaluate()
    assert metrics["loss"] == pytest.approx(game.losses(*held_out).mean().item(), rel=1e-6)
    assert [finding.status for finding in doctor(game.joint, DATA, sgd()).named("loss")] == ["ok"]
    drawing = JointLoss(
        lambda *batch: game.losses(*batch) * torch.rand(len(batch[0])), game.joint.trained, game.joint.held
    )
    assert [finding.status for finding in doctor(drawing, DATA, sgd()).named("loss")] == ["not tried"]
