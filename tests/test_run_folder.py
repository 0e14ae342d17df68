"""The run folder before and after a run: an older run is lost only once the new one has really trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from heavylift.config.run_folder import RunFolder, has_trained, is_run_folder

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
