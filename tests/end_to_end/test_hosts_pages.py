"""The scripts of docs/hosts.md: each runs as it stands; at night in processes of its own, two where it can."""

import csv
import json
import re
import stat
import sys
from pathlib import Path

import pytest
import torch

from tests.depth import chosen
from tests.forks import as_torchrun_does, run_script
from tests.fresh import python

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    kind: script
    for script in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/hosts.md").read_text(), flags=re.DOTALL | re.M)
    for kind in ("transformers", "accelerate", "pytorch_lightning")
    if f"from {kind}" in script
}
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Without MPI this is how accelerate starts several processes on a machine without GPUs.
LAUNCH = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
LAUNCH += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")


def run(kind: str, folder: Path, launcher: list[str], more: str = "") -> str:
    """Run a page's script, and what is added to it, and return what it printed."""
    pytest.importorskip(kind, exc_type=ImportError)
    script = SCRIPTS[kind].replace("devices=1,", "devices=2,") if launcher else SCRIPTS[kind]
    (folder / "train.py").write_text(script + more)
    # Imports take seconds, and other tests need them, too; Lightning leaves a group of processes behind.
    if chosen(True, False):
        if kind == "pytorch_lightning":
            as_torchrun_does(1, run_script, folder)
        else:
            run_script(0, folder)
        return (folder / "0").read_text()
    start = ["-m", *launcher] if launcher else []
    found = python(*start, "train.py", folder=folder, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_there_is_a_script_for_each_host():
    assert len(SCRIPTS) == 3


def test_hugging_face(tmp_path: Path):
    printed = run("transformers", tmp_path, [])
    assert printed.count("Privacy statement") == 1
    state = json.loads((tmp_path / "run/checkpoint-20/trainer_state.json").read_text())
    assert state["log_history"][-1]["epsilon"] < 3
    assert (tmp_path / "published/model.safetensors").exists()


def test_accelerate(tmp_path: Path):
    pytest.importorskip("tensorboard")
    launcher = chosen([], LAUNCH)
    more = f"\nassert accelerator.num_processes == {2 if launcher else 1} and private.steps_taken == 20\n"
    crossed = "any('crossed the network' in caveat for caveat in private.statement().caveats)"
    more += f"assert {crossed} == {bool(launcher)}\n"
    printed = run("accelerate", tmp_path, launcher, more)
    assert printed.count("Privacy statement") == 1
    state = torch.load(tmp_path / "run/state.pt", weights_only=True)
    assert state["optimizer"]["dpcore"]["public"]["step"] == 20


# Goes on from the middle of the second epoch, in the same folder, with a new trainer.
RESUMED = """
from unittest.mock import patch
(path,) = Path("run").rglob("*step=15.ckpt")
assert torch.load(path, weights_only=True)["optimizer_states"][0]["dpcore"]["public"]["step"] == 15
again = Classifier()
with patch.object(dpcore.torch.PrivateRun, "step", autospec=True, side_effect=dpcore.torch.PrivateRun.step) as steps:
    resumed = pl.Trainer(max_epochs=2, strategy=NotWrapped(), plugins=[OwnerOnly()],
                         devices=trainer.num_devices, logger=False, enable_checkpointing=False)
    resumed.fit(again, ckpt_path=path)
assert steps.call_count == 5 and again.private.steps_taken == resumed.global_step == 20
assert abs(again.private.epsilon() - module.private.epsilon()) < 1e-9
"""
# A callback that saw results ends the run, and the checkpoint of that moment says so.
STOPPED = """
from pytorch_lightning.callbacks import EarlyStopping
early = EarlyStopping("accuracy", mode="max", patience=1, min_delta=10.0)
last, stopped = ModelCheckpoint(dirpath="stopped", save_last=True), Classifier()
pl.Trainer(max_epochs=4, strategy=NotWrapped(), plugins=[OwnerOnly()], callbacks=[early, last],
           devices=trainer.num_devices, logger=False).fit(stopped)
state = torch.load("stopped/last.ckpt", weights_only=True)["optimizer_states"][0]["dpcore"]["public"]
assert state["step"] == stopped.private.steps_taken == 20 and state["stopped_by_results"]
"""


def test_lightning(tmp_path: Path):
    run("pytorch_lightning", tmp_path, chosen([], TORCHRUN), RESUMED + STOPPED)
    checkpoints = list((tmp_path / "run").rglob("*.ckpt"))
    assert len(checkpoints) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in checkpoints} == {0o600}
    (table,) = (tmp_path / "run").rglob("metrics.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    spent = {"epsilon", "epsilon_planned"}
    assert set(rows[0]) == {"epoch", "step", "accuracy", "lr-PrivateOptimizer"} | spent
