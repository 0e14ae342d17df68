"""A save that is killed at any of its file operations loses no checkpoint, and the next one clears up after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from heavylift.api import checkpoint_folders
from heavylift.api.checkpoint_folders import begin, finish, is_complete, locate, saving_place, tags_in
from heavylift.errors import UserError

TENSORS, OPERATIONS = "__0_0.distcp", {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}
KILLED = 9


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill does not lose what the system holds; `test_files.py` has the power cuts."""
    monkeypatch.setattr(os, "fsync", lambda opened: None)


def save(folder: Path, tag: str, text: str) -> None:
    """What `checkpoint.write` does, with `text` in every file."""
    begin(folder, tag)
    for name in (TENSORS, checkpoint_folders.METADATA):
        (saving_place(folder, tag) / name).write_text(text)
    finish(folder, tag, text, text.encode())


def content(path: Path | None) -> str:
    """The text that all files of the checkpoint have in common."""
    assert path is not None
    names = (TENSORS, checkpoint_folders.METADATA, checkpoint_folders.EXTRAS, checkpoint_folders.TRAINING)
    (text,) = {(path / name).read_text() for name in names}
    return text


def killed_at(operation: int, action: Callable[[], object]) -> bool:
    """Runs `action` in a child that ends, as by SIGKILL, before that file operation: did it come to it?"""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, _: object) -> None:
            nonlocal seen
            seen += event in OPERATIONS
            if seen > operation:
                os._exit(KILLED)

        try:
            sys.addaudithook(hook)
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED


def left_over(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if checkpoint_folders.is_left_over(path.name)]


@pytest.mark.parametrize("tag", ["last", "best/of 3"])
def test_a_save_killed_anywhere_leaves_the_old_or_the_new_one(tag: str, tmp_path: Path) -> None:
    seen, operation = [], 0
    while True:
        folder = tmp_path / str(operation)
        save(folder, tag, "old")
        (folder / tag / "notes").write_text("mine")
        was_killed = killed_at(operation, lambda folder=folder: save(folder, tag, "new"))  # type: ignore[misc]
        found = content(locate(folder, tag))
        seen.append(found)
        # the next one puts that into its place before it writes, and a kill while it does so loses nothing either
        again = 0
        while killed_at(again, lambda folder=folder: begin(folder, tag)):  # type: ignore[misc]
            assert content(locate(folder, tag)) == found
            again += 1
        assert content(folder / tag) == found
        save(folder, tag, "newest")
        assert content(folder / tag) == "newest" and left_over(folder) == []
        assert (folder / tag / "notes").read_text() == "mine"
        if not was_killed:
            break
        operation += 1
    assert operation > 10 and seen == sorted(seen, reverse=True) and set(seen) == {"old", "new"}, seen


def test_the_first_save_of_a_tag_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    operation = 0
    while killed_at(operation, lambda at=operation: save(tmp_path / str(at), "a", "new")):  # type: ignore[misc]
        folder = tmp_path / str(operation)
        found = locate(folder, "a")
        assert found is None or content(found) == "new"
        assert tags_in(folder) == ([] if found is None else ["a"])
        save(folder, "b", "other")  # of another tag: a whole one is kept
        assert is_complete(folder / "a") is (found is not None) and left_over(folder) == []
        operation += 1
    assert operation > 5 and found is not None, "the last kills come after it is whole"


def test_checkpoints_below_a_tag_outlive_it(tmp_path: Path) -> None:
    save(tmp_path, "best", "1")
    save(tmp_path, "best/of 3", "2")
    operation = 0
    while killed_at(operation, lambda: save(tmp_path, "best", "1")):
        assert content(locate(tmp_path, "best/of 3")) == "2" and content(locate(tmp_path, "best")) == "1"
        operation += 1
    assert content(tmp_path / "best" / "of 3") == "2"


def test_a_folder_that_a_script_makes_after_a_kill_hides_nothing(tmp_path: Path) -> None:
    save(tmp_path, "last", "old")
    os.replace(tmp_path / "last", tmp_path / ".last.replaced")  # killed between the two renames, the new one damaged
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "args.json").write_text("{}")
    assert content(locate(tmp_path, "last")) == "old"
    begin(tmp_path, "last")
    assert content(tmp_path / "last") == "old" and (tmp_path / "last" / "args.json").is_file()


def test_a_link_is_replaced_and_a_file_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "other disk", "a", "old")
    (tmp_path / "a").symlink_to(tmp_path / "other disk" / "a")
    save(tmp_path, "a", "new")
    assert content(tmp_path / "a") == "new" and content(tmp_path / "other disk" / "a") == "old"
    assert left_over(tmp_path) == []
    (tmp_path / "b").write_text("")
    with pytest.raises(UserError, match="b: expected a folder or nothing, got a file; choose another tag"):
        begin(tmp_path, "b")
