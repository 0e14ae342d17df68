"""A file that is replaced is the old or the new one, whole, whatever goes wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import command_env

from heavylift.files import Room, _lies_in_memory, replacing, sync


def test_it_takes_its_place_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as part:
        part.write_text("one")
        assert not path.exists() and part.parent == tmp_path
    assert path.read_text() == "one"
    with pytest.raises(KeyError), replacing(path) as part:
        part.write_text("tw")
        raise KeyError
    assert path.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_it_is_on_the_disk_before_it_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(opened: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{opened}')).name}")
        real_fsync(opened)

    def replace(source: Path, target: Path) -> None:
        done.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with replacing(tmp_path / "file") as part:
        part.write_text("one")
    assert done == ["sync .file.part", "replace", f"sync {tmp_path.name}"]


def test_a_write_that_only_the_disk_refuses_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(opened: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), replacing(path) as part:
        part.write_text("new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_file_system_that_syncs_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(opened: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    with pytest.raises(OSError):
        sync(tmp_path / "file")


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "file")
    with replacing(tmp_path / "link") as part:
        part.write_text("one")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "file").read_text() == "one"


def test_room_on_a_disk_is_taken_without_a_name_and_given_back(tmp_path: Path) -> None:
    if _lies_in_memory(tmp_path):
        pytest.skip("temporary files lie in memory here")
    room = Room(tmp_path, 48_000_000)
    if room.num_bytes == 0:
        pytest.skip("this file system cannot keep room")
    assert 48_000_000 <= room.num_bytes < 49_000_000 and list(tmp_path.iterdir()) == []
    room.release()
    room.release()
    assert room.num_bytes == 0
    # more than the disk has: nothing is kept, and nothing is said
    assert Room(tmp_path, 2**60).num_bytes == 0 and list(tmp_path.iterdir()) == []


def test_no_room_is_kept_where_it_would_be_memory_or_may_not_be(tmp_path: Path) -> None:
    if _lies_in_memory(Path("/dev/shm")):
        assert Room(Path("/dev/shm"), 2**20).num_bytes == 0
    assert Room(tmp_path / "nowhere", 2**20).num_bytes == 0
    # blocks behind the end of a file are no part of what a limit for files allows
    script = (
        "import resource, sys; from pathlib import Path; from heavylift.files import Room\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "print(Room(Path(sys.argv[1]), 2**22).num_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], env=command_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) in (0, 2**22)
