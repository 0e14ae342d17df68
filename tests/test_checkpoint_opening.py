"""Ranks that see other files: all load the same checkpoint, or all say why not; nobody waits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from parity_api.models import MAKERS
from parity_api.runs import Case, ds_config
from ranks.pool import run_on_ranks

import heavylift
from heavylift.api.checkpoint_opening import on_every_rank
from heavylift.errors import UserError

CASE = Case("branches", 3, "cpu", "bf16", 1)


def make_engine() -> heavylift.api.engine.Engine:
    return heavylift.initialize(model=MAKERS[CASE.model](), config=ds_config(CASE, dist.get_world_size()))[0]


def own(folder: Path) -> Path:
    """The folder that a rank sees."""
    return folder / f"rank{dist.get_rank()}"


def on_rank(rank: int, action: Callable[[], object]) -> None:
    if dist.get_rank() == rank:
        action()


# ---- what differs: each prepares it in this rank's folder -----------------------------------------------------------


def nothing(folder: Path) -> None:
    """All the same."""


def a_tag_on_rank_0_alone(folder: Path) -> None:
    on_rank(1, lambda: shutil.rmtree(folder / "new"))


def an_older_latest_on_rank_1(folder: Path) -> None:
    on_rank(1, lambda: (folder / "latest").write_text("old"))


def no_latest_on_rank_0(folder: Path) -> None:
    on_rank(0, lambda: (folder / "latest").unlink())


def no_latest_on_rank_1(folder: Path) -> None:
    on_rank(1, lambda: (folder / "latest").unlink())


def a_damaged_latest_on_rank_1(folder: Path) -> None:
    on_rank(1, lambda: (folder / "latest").write_text("../"))


def no_extras_on_rank_1(folder: Path) -> None:
    on_rank(1, lambda: (folder / "new" / "extras.pt").unlink())


def no_tensors_on_rank_1(folder: Path) -> None:
    on_rank(1, lambda: (folder / "new" / "__1_0.distcp").unlink())


def another_time_on_rank_1(folder: Path) -> None:
    on_rank(1, lambda: shutil.rmtree(folder / "new"))
    on_rank(1, lambda: (folder / "old").rename(folder / "new"))


def nothing_saved_at_all(folder: Path) -> None:
    shutil.rmtree(folder)


def nothing_saved_on_rank_0(folder: Path) -> None:
    on_rank(0, lambda: shutil.rmtree(folder))


EXPECTED = {
    nothing: "new",
    an_older_latest_on_rank_1: "new",
    no_latest_on_rank_1: "new",
    nothing_saved_at_all: "None",
    a_tag_on_rank_0_alone: "rank 1: {1}/new is no checkpoint; these are there: old",
    no_latest_on_rank_0: "load_checkpoint: rank 0 finds no file `latest` in {here}, rank 1 finds new named in its own; "
    "load from a folder that all ranks see, or give a tag",
    nothing_saved_on_rank_0: "load_checkpoint: rank 0 finds no file `latest` in {here}, rank 1 finds new",
    a_damaged_latest_on_rank_1: "rank 1: {1}/latest is damaged: ",
    no_extras_on_rank_1: "rank 1: {1}/new/extras.pt is damaged ",
    another_time_on_rank_1: "load_checkpoint: rank 1 finds another checkpoint new than rank 0 ",
    no_tensors_on_rank_1: "",
}


def job(folder: Path) -> dict[str, str]:
    """What `load_checkpoint` gives or says on this rank where the ranks' folders differ in one way after the other."""
    engine = make_engine()
    for tag in ("old", "new"):
        engine.save_checkpoint(folder / "all", tag=tag, client_state={"tag": tag})
    found = {}
    for prepare in EXPECTED:
        dist.barrier()
        here = own(folder / prepare.__name__)
        shutil.copytree(folder / "all", here)
        prepare(here)
        try:
            path, client_state = engine.load_checkpoint(here)
            found[prepare.__name__] = str(path and client_state["tag"])
            assert path is None or path == str(here / "new")
        except UserError as error:
            found[prepare.__name__] = str(error)
    tags = ("old", "new")
    with pytest.raises(UserError, match="load_checkpoint: tag should be the same on all ranks, got "):
        engine.load_checkpoint(folder / "all", tag=tags[dist.get_rank()])
    engine.destroy()
    return found


def scattered_job(folder: Path) -> str:
    """What saving to a folder per rank says, over a checkpoint that is whole."""
    engine = make_engine()
    engine.save_checkpoint(folder, tag="last")
    dist.barrier()
    on_rank(0, lambda: shutil.copytree(folder, own(folder) / "saved", ignore=shutil.ignore_patterns("rank*")))
    dist.barrier()
    with pytest.raises(UserError) as caught:
        engine.save_checkpoint(own(folder) / "saved", tag="last")
    on_rank(1, lambda: shutil.rmtree(own(folder)))
    dist.barrier()
    assert engine.load_checkpoint(folder / "rank0" / "saved")[0] == str(folder / "rank0" / "saved" / "last")
    engine.destroy()
    return str(caught.value)


def test_a_checkpoint_is_not_scattered_over_the_ranks_disks(tmp_path: Path) -> None:
    lack = tmp_path / "rank0" / "saved" / ".last.saving" / "__1_0.distcp"
    for message in run_on_ranks(2, scattered_job, tmp_path, timeout_s=60):
        assert message == f"save_checkpoint: {lack} is missing for rank 0; save to a folder that all ranks share"
    assert sorted(path.name for path in (tmp_path / "rank0" / "saved").iterdir()) == ["last", "latest"]


def failing_job() -> list[str]:
    """What each rank raises where only rank 1 fails, in one way after the other."""
    found = []
    for error in (PermissionError(13, "Permission denied", "/disk"), UserError("no"), KeyError("a")):

        def act(error: Exception = error) -> int:
            if dist.get_rank() == 1:
                raise error
            return 3

        with pytest.raises((UserError, KeyError, RuntimeError)) as caught:
            on_every_rank(act)
        found.append(f"{caught.type.__name__}: {caught.value}")
    assert on_every_rank(lambda: dist.get_rank()) == dist.get_rank()
    return found


def test_a_failure_of_one_rank_is_everybodys() -> None:
    first, second = run_on_ranks(2, failing_job, timeout_s=60)
    common = ["UserError: rank 1: /disk: cannot be read: Permission denied", "UserError: rank 1: no"]
    assert first == [*common, "RuntimeError: rank 1 has failed: KeyError: 'a'"]
    assert second == [*common, "KeyError: 'a'"]


def test_all_ranks_load_the_same_or_say_why_not(tmp_path: Path) -> None:
    results = run_on_ranks(2, job, tmp_path, timeout_s=120)
    for prepare, expected in EXPECTED.items():
        folders = [str(tmp_path / prepare.__name__ / f"rank{rank}") for rank in (0, 1)]
        for rank, found in enumerate(results):
            message = found[prepare.__name__]
            assert "\n" not in message
            text = expected.replace("{1}", folders[1]).replace("{here}", folders[rank])
            assert message.startswith(text), (prepare.__name__, rank, message)
    for rank, found in enumerate(results):
        message = found["no_tensors_on_rank_1"]
        assert (
            str(tmp_path / "no_tensors_on_rank_1" / f"rank{rank}" / "new") in message and "load another tag" in message
        )
