"""What a person brings from another library gets the sentence that helps; what a run says of itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import dpcore
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.ledger import Ledger
from dpcore.torch import make_private
from tests.unit.torch_runs import DATA, finish, model, sgd, start

NET = model()
OPTIMIZER = torch.optim.SGD(NET.parameters(), lr=0.1)


def test_arguments_of_opacus_are_each_told_where_they_go() -> None:
    given: Any = {"module": NET, "optimizer": OPTIMIZER, "data_loader": DataLoader(DATA[0]), "max_grad_norm": 1.0}
    with pytest.raises(ArgumentTypeError) as caught:
        make_private(**given)
    for words in ("no module= (give model=)", "no optimizer= (the method has one, as in dpcore.methods.dp_sgd(",
        "no data_loader= (give the loader's dataset as data=", "dpcore.methods.dp_sgd(max_grad_norm=...)"):  # fmt: skip
        assert words in str(caught.value)


@pytest.mark.parametrize(("args", "options", "words"), [
    ((NET, DATA, sgd()), {"epoch": 1}, r"takes no epoch= \(did you mean epochs=\)"),
    ((NET, DATA, sgd()), {"xyzzy": 1}, r"takes no xyzzy= \(leave it out\)"),
    ((NET, DATA, OPTIMIZER), {}, r"method=SGD: .*dpcore.methods.dp_sgd\(lr=0.1, base='sgd'\)"),
    ((NET, DATA, torch.optim.AdamW), {}, r"method=AdamW: .*base='adamw'\)"),
    ((NET, DATA, dpcore.methods.disk), {}, r"method=disk: .*call it, disk\(lr=0.1\)"),
    ((NET, DATA, "disk"), {}, "method='disk': must be a dpcore.Method"),
    ((NET, DATA, sgd()), {"loss": nn.CrossEntropyLoss, "epochs": 1}, r"loss=CrossEntropyLoss: is a class; .*Loss\(\)"),
])  # fmt: skip
def test_wrong_arguments_end_in_one_sentence(args: Any, options: Any, words: str) -> None:
    with pytest.raises(ArgumentTypeError, match=words) as caught:
        make_private(*args, **options)
    assert "\n" not in str(caught.value)


def test_python_says_what_is_missing() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'method'"):
        make_private(NET, DATA)


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.Adam(NET.parameters()), dpcore.updates.Adam])
def test_an_optimizer_as_base_is_refused_with_its_name(base: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"base=Adam: must be one of 'sgd', .*; give base='adam'"):
        dpcore.methods.disk(lr=0.1, base=base)


def test_a_setting_of_another_base_names_that_base() -> None:
    with pytest.raises(ArgumentError, match=r"^momentum=0.9 with base='sgd': give base='momentum', which has it$"):
        dpcore.methods.dp_sgd(lr=0.1, momentum=0.9)


def test_a_batch_in_two_arguments_is_told_to_be_one() -> None:
    run = start(model())
    inputs, labels = next(iter(run.loader))
    with pytest.raises(ArgumentError, match=r"A batch is one argument: private.step\(\(inputs, labels\)\)"):
        run.step(inputs, labels)


def test_a_public_state_is_made_of_the_optimizers_part_of_a_checkpoint() -> None:
    run = start(model())
    with pytest.raises(ArgumentError, match="if a checkpoint contains it, give that entry"):
        dpcore.torch.public_state({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})


class Detached(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


def contrast(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Within a batch: of one example alone it is 0."""
    return -torch.log_softmax(output @ output.T, 1).diagonal().mean() + 0 * labels.sum()


@pytest.mark.parametrize(
    ("net", "options"),
    [
        (Detached(model()), {}),
        (model(), {"loss": lambda output, labels: (output.argmax(1) != labels).float().mean()}),
        (model(), {"loss": contrast}),
    ],
    ids=["detached", "without a gradient", "contrast"],
)
def test_a_loss_that_says_nothing_of_one_example_is_refused(net: nn.Module, options: Any) -> None:
    with pytest.raises(ArgumentError, match="loss whose gradient is 0 in all parameters"):
        start(net, **options)


def test_layers_may_read_lazily_negated_tensors() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.complex(x, -x).conj().imag)

    for backend in ("torch", "numpy"):
        with dpcore.use_backend(backend):
            assert torch.equal(finish(start(Net())), finish(start(model())))


def test_other_bases() -> None:
    with pytest.raises(ArgumentTypeError, match=r"base=LBFGS: must be one of .* such as Adam\(lr=0.001\)$"):
        dpcore.methods.disk(lr=0.1, base=torch.optim.LBFGS)
    with pytest.raises(ArgumentTypeError, match=r"^update=SGD: must be a stage from dpcore\.updates$"):
        dpcore.Method(update=OPTIMIZER)
    assert dpcore.methods.disk(base=dpcore.updates.Adam(lr=0.1)).update.rule == "adam"


def test_a_run_says_what_it_is() -> None:
    run = start(model(), sgd(noise_multiplier=1.5), stop=2)
    told = repr(run).splitlines()
    assert (told[0], told[-1]) == ("PrivateRun(", ")")
    spent, planned = (run.plan.epsilon(1e-5, steps=steps) for steps in (2, 12))
    for words in ("model: Sequential, 66 trained parameters", "method: dp_sgd, noise multiplier 1.5",
        "steps: 2 of 12 done", "sampling: PoissonSampler, batches of 8 of 30 expected", ", 1 process"):  # fmt: skip
        assert words in repr(run)
    (line,) = (line for line in told if "epsilon" in line)
    numbers = [float(word) for word in line.replace(",", "").split() if word[0].isdigit()]
    assert numbers == pytest.approx([spent, planned, 1e-5], rel=1e-3)
    assert numbers[0] >= spent
    assert numbers[1] >= planned
    assert run.steps_taken == 2


@pytest.mark.parametrize("gradients", ["pairs", "one-by-one"])
def test_noise_too_large_for_the_grid_is_refused_before_a_ledger_knows_the_run(tmp_path: Path, gradients: str) -> None:
    Ledger.create(path := tmp_path / "own.ledger", budget=(1.0, 1e-5))
    method = sgd(noise_multiplier=1e9, clipping_groups={"0.*": 1.0, "2.*": 1e-3})
    with pytest.raises(ArgumentError, match="noise_multiplier: is so large that the grid of its noise"):
        make_private(model(), DATA, method, steps=4, gradients=gradients, ledger=path, microbatch_size=4)
    assert not Ledger.open(path).runs()


def test_a_run_whose_ledger_is_gone_is_shown_all_the_same(tmp_path: Path) -> None:
    run = start(model(), sgd(), stop=2, ledger=Ledger.create(tmp_path / "people.ledger"))
    assert "unknown" not in repr(run)
    (tmp_path / "people.ledger").unlink()
    assert "epsilon: unknown (the ledger cannot be read) spent of" in repr(run)
