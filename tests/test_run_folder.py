"""The run folder before and after a run: an older run is lost only once the new one has really trained."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from heavylift.config.run_folder import RunFolder, check_output_dir, has_trained, is_run_folder
from heavylift.config.schema import Recipe
from heavylift.errors import UserError

RECIPE = "model: {}\ndata: {}\ntrain: {}\n"


def make_run(folder: Path, note: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(RECIPE)
    (folder / "note").write_text(note)


def step(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_user_error_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make_room()
    make_run(tmp_path / "run", "new")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 2.5}\n')
    run.settle(user_error=True)
    assert files(tmp_path) == []


@pytest.mark.parametrize("made", [True, False])
def test_user_error_brings_the_older_run_back(tmp_path: Path, made: bool) -> None:
    make_run(tmp_path / "run", "old")
    step(tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    run.make_room()
    assert not (tmp_path / "run").exists()
    if made:
        make_run(tmp_path / "run", "new")
    run.settle(user_error=True)
    assert files(tmp_path) == ["run", "run/config.yaml", "run/metrics.jsonl", "run/note"]
    assert (tmp_path / "run" / "note").read_text() == "old"


def test_crash_before_anything_was_written_brings_it_back_too(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "old")
    run = RunFolder(tmp_path / "run")
    run.make_room()
    run.settle(user_error=False)
    assert (tmp_path / "run" / "note").read_text() == "old"


def test_a_crash_before_the_first_step_brings_it_back_too(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "old")
    step(tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    run.make_room()
    make_run(tmp_path / "run", "new")
    run.settle(user_error=False)
    assert (tmp_path / "run" / "note").read_text() == "old" and has_trained(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("user_error", [True, False])
def test_what_was_trained_is_kept(tmp_path: Path, user_error: bool) -> None:
    make_run(tmp_path / "run", "old")
    run = RunFolder(tmp_path / "run")
    run.make_room()
    make_run(tmp_path / "run", "new")
    step(tmp_path / "run")
    run.settle(user_error)  # a full disk at the end is a user error too
    assert files(tmp_path) == ["run", "run/config.yaml", "run/metrics.jsonl", "run/note"]
    assert (tmp_path / "run" / "note").read_text() == "new"


def test_an_empty_folder_of_the_user_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = RunFolder(tmp_path / "run")
    run.make_room()
    make_run(tmp_path / "run", "new")
    run.settle(user_error=True)
    assert files(tmp_path) == ["run"]


def test_what_counts_as_a_run_folder(tmp_path: Path) -> None:
    assert not is_run_folder(tmp_path)
    for other in ("", "- model\n", "model: {}\n", "model: [", "\x00"):
        (tmp_path / "config.yaml").write_text(other)
        assert not is_run_folder(tmp_path), other
    (tmp_path / "config.yaml").write_text(RECIPE)
    assert is_run_folder(tmp_path)


def test_damaged_metrics_are_kept(tmp_path: Path) -> None:
    assert not has_trained(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "los')
    assert has_trained(tmp_path)


def test_a_second_run_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.make_room()
    make_run(tmp_path / "run", "first")
    step(tmp_path / "run")
    with pytest.raises(UserError, match=f"another run is at work there \\(process {os.getpid()}\\)"):
        second.make_room()
    assert (tmp_path / "run" / "note").read_text() == "first"
    first.settle(user_error=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    third = RunFolder(tmp_path / "run")
    third.make_room()
    third.settle(user_error=True)
    assert (tmp_path / "run" / "note").read_text() == "first"


def test_a_lock_whose_file_is_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (RunFolder(tmp_path / "run") for _ in range(3))
    first.make_room()
    real_flock = fcntl.flock

    def flock(opened: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real_flock)
        first.settle(user_error=False)  # between opening the file and locking it
        real_flock(opened, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    second.make_room()
    with pytest.raises(UserError, match="another run is at work there"):
        third.make_room()
    second.settle(user_error=False)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(opened: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    run = RunFolder(tmp_path / "run")
    run.make_room()
    run.settle(user_error=True)
    assert files(tmp_path) == []


def killed(folder: Path, note: str | None, trains: bool = False) -> None:
    """A run that replaces an older one and is killed: before it has a folder, or in its folder."""
    child = os.fork()
    if child == 0:
        RunFolder(folder).make_room()
        if note is not None:
            make_run(folder, note)
        if trains:
            step(folder)
        os._exit(9)
    os.waitpid(child, 0)
    (aside,) = folder.parent.glob(".run.replaced-*")
    (aside / "note").unlink()  # only what a run writes


@pytest.mark.parametrize(("note", "trains"), [(None, False), ("new", False), ("new", True)])
def test_after_a_kill_the_older_run_is_put_back_or_removed(note: str | None, trains: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, "old")
    (folder / "metrics.jsonl").write_text('{"step": 7, "loss": 2.5}\n')
    killed(folder, note, trains)
    (folder / "note").unlink(missing_ok=True)
    recipe = _recipe(folder)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"overwrite_output_dir": False})})
    with pytest.raises(UserError, match="run: exists; choose another"):
        check_output_dir(recipe)
    assert json.loads((folder / "metrics.jsonl").read_text())["step"] == (1 if trains else 7)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_after_a_kill_nothing_of_the_users_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, "old")
    killed(folder, None)
    folder.mkdir()
    (folder / "mine").write_text("")
    with pytest.raises(UserError, match="is no heavylift run folder"):
        check_output_dir(_recipe(folder))
    assert (folder / "mine").is_file() and len(list(tmp_path.glob(".run.replaced-*"))) == 1


def test_what_a_run_at_work_has_moved_aside_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, "old")
    step(folder)
    run = RunFolder(folder)
    run.make_room()
    check_output_dir(_recipe(folder))
    assert not folder.exists()
    run.settle(user_error=True)
    assert (folder / "note").read_text() == "old"


def _recipe(folder: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"model_name_or_path": "m"},
            "data": {"dataset": "d"},
            "train": {"output_dir": str(folder), "overwrite_output_dir": True},
        }
    )


def test_what_the_user_put_into_a_run_folder_is_not_deleted(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "mine")
    with pytest.raises(UserError, match="holds note, which heavylift did not write"):
        check_output_dir(_recipe(tmp_path / "run"))
    (tmp_path / "run" / "note").unlink()
    check_output_dir(_recipe(tmp_path / "run"))


def test_a_disk_that_refuses_the_lock_is_a_user_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(UserError, match="run: cannot be made: File too large; free the disk or choose another"):
            RunFolder(tmp_path / "run").make_room()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("length", [300, 250])  # longer names stand beside it while it is replaced
def test_a_name_too_long_is_a_user_error(tmp_path: Path, length: int) -> None:
    with pytest.raises(UserError, match="cannot be made: File name too long"):
        check_output_dir(_recipe(tmp_path / ("a" * length)))
