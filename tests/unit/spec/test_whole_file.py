"""A file is written whole or not at all, and nothing else stays behind."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpcore.spec.whole_file import whole_file


@pytest.fixture
def full(monkeypatch) -> Iterator[None]:
    """A disk on which no write reaches the end."""

    def no_space(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        yield


def write(target: Path, content: bytes, **options: bool) -> None:
    with whole_file(target, **options) as file:
        file.write(content)


def test_it_takes_the_place_of_the_file_that_was_there(tmp_path):
    for content in (b"one", b"two"):
        write(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_leaves_the_old_file_no_draft_and_its_name_in_the_error(tmp_path, request):
    write(tmp_path / "a", b"one")
    request.getfixturevalue("full")
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "a", b"two")
    assert caught.value.filename == str(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_signal_in_the_middle_leaves_no_draft(tmp_path):
    def stopped() -> None:
        with whole_file(tmp_path / "a") as file:
            file.write(b"part")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list(tmp_path.iterdir()) == []


def test_an_older_draft_is_no_obstacle_and_a_secret_is_its_owners(tmp_path):
    (tmp_path / ".a.draft").write_text("of a process that was killed")
    former = os.umask(0)
    try:
        write(tmp_path / "a", b"key", secret=True)
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_name_is_on_disk_before_the_block_has_ended(tmp_path, monkeypatch):
    """A file that is synced and then moved can be gone after a power loss: its folder is synced after the move."""
    synced, real = [], os.fsync

    def watched(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            synced.append((tmp_path / "a").read_bytes())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write(tmp_path / "a", b"one")
    assert synced == [b"one"]
