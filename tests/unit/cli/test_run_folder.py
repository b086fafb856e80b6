"""The run folder: whole files, no foreign file touched, nothing overwritten unasked."""

import json
import math

import pytest

from dpcore.cli.train.run_folder import COMPARISON, RUN, RunFolder, holds, next_folder, read_run
from dpcore.errors import DataError
from tests.refused import refused


def test_an_old_run_is_kept_unless_overwrite_is_said(tmp_path):
    RunFolder(tmp_path / "run").write_config({"lr": 1}, None, {})
    refused(DataError, "already has a run; name another folder or add --overwrite", RunFolder, tmp_path / "run")
    (tmp_path / "run" / "notes.md").write_text("mine")
    (tmp_path / "run" / "metrics.jsonl").write_text("old")
    (tmp_path / "run" / "tensorboard").mkdir()
    RunFolder(tmp_path / "run", overwrite=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.md"]


def test_a_checkpoint_lies_beside_the_folder_and_goes_with_its_run_only(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert folder.checkpoint == tmp_path / "run.checkpoint"
    folder.write_config({}, None, {})
    folder.checkpoint.write_text("keys")
    with pytest.raises(DataError, match=r"continue it \(dpcore train --resume .*run\), name another folder or add"):
        RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run", overwrite=True)
    assert not folder.checkpoint.exists()
    folder.checkpoint.write_text("keys of a run whose folder is gone")
    for overwrite in (False, True):
        refused(DataError, "the checkpoint of another run, ", RunFolder, tmp_path / "run", overwrite=overwrite)
    assert next_folder(tmp_path, "run").name == "run-2"
    (tmp_path / "other.checkpoint").write_text("not a comparison's")
    RunFolder(tmp_path / "other", kind=COMPARISON)


def test_a_folder_that_is_no_run_is_never_touched(tmp_path):
    (tmp_path / "config.json").write_text('{"kind": "something else"}')
    (tmp_path / "statement.txt").write_text("mine")
    refused(DataError, "has no dpcore run", RunFolder, tmp_path, overwrite=True)
    assert (tmp_path / "statement.txt").read_text() == "mine"
    RunFolder(tmp_path / "run").write_config({}, None, {})  # its statement says what was spent, and its model cost it
    refused(DataError, "has no dpcore compare", RunFolder, tmp_path / "run", overwrite=True, kind=COMPARISON)
    refused(DataError, "is a file", RunFolder, tmp_path / "statement.txt")
    refused(DataError, "cannot be made", RunFolder, tmp_path / "statement.txt" / "deeper")


def test_a_comparison_goes_with_its_runs_and_nothing_else(tmp_path):
    out = tmp_path / "comparison"
    RunFolder(out, kind=COMPARISON).write_config({}, None)
    for name in ("001-a", "002-b"):
        RunFolder(out / "runs" / name).write_config({}, None, {})
    (out / "runs" / "002-b" / "notes.md").write_text("mine")
    (out / "runs" / "001-a.checkpoint").write_text("keys")
    RunFolder(out, kind=COMPARISON, overwrite=True)
    assert [str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()] == ["runs/002-b/notes.md"]


def test_a_run_is_read_and_its_absence_is_no_statement(tmp_path):
    RunFolder(tmp_path).write_config({}, None, {})
    assert holds(tmp_path, RUN)
    assert read_run(tmp_path) == (None, [])
    (tmp_path / "statement.json").write_text("{}")
    refused(DataError, f"run folder {tmp_path}: cannot be read", read_run, tmp_path)


def test_an_empty_folder_is_taken_and_names_count_up(tmp_path):
    assert RunFolder(tmp_path).path == tmp_path
    names = [RunFolder(next_folder(tmp_path / "runs", "digits")).path.name for _ in range(3)]
    assert names == ["digits", "digits-2", "digits-3"]


def test_metrics_are_whole_lines_at_once(tmp_path):
    folder = RunFolder(tmp_path)
    for epoch in (1, 2, 3):
        folder.log({"epoch": epoch, "epsilon": math.inf})
        read = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [item["epoch"] for item in read] == list(range(1, epoch + 1))
    assert read[0]["epsilon"] == "inf"
