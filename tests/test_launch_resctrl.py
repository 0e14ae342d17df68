"""Cache and bandwidth parts on a fake resctrl tree: arithmetic, groups, whose threads move, what can be missing."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import command_env

from heavylift.errors import UserError
from heavylift.launch import resctrl
from heavylift.launch.resctrl import NotAvailable, Partitions, partitions, threads_below
from heavylift.launch.resctrl_schemata import bandwidth_percent, parse_schemata, parse_shares, schemata_line, split_ways

RDT = {"L3": {"cbm_mask": "fffff", "min_cbm_bits": "1"}, "MB": {"min_bandwidth": "10", "bandwidth_gran": "10"}}
BOTH = "    L3:0=fffff;1=fffff\n    MB:0=100;1=100\n"


class Tree:
    """A resctrl file system of ordinary files: making a group fills its folder, and groups can run out."""

    def __init__(self, root: Path, info: dict, schemata: str, options: str = "rw", groups: int = 8) -> None:
        self.root, self.mount = root, root / "sys/fs/resctrl"
        for resource, files in info.items():
            (self.mount / "info" / resource).mkdir(parents=True)
            for name, text in files.items():
                (self.mount / "info" / resource / name).write_text(text + "\n")
        (self.mount / "schemata").write_text(schemata)
        (self.mount / "tasks").write_text("")
        (root / "proc").mkdir(parents=True)
        (root / "proc/mounts").write_text(f"proc /proc proc rw 0 0\nresctrl /sys/fs/resctrl resctrl {options} 0 0\n")
        self._left = groups

    def mkdir(self, folder: Path) -> None:
        if self._left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        self._left -= 1
        folder.mkdir()
        (folder / "tasks").touch()
        (folder / "schemata").touch()

    def rmdir(self, folder: Path) -> None:
        shutil.rmtree(folder)

    def partitions(self) -> Partitions:
        return Partitions(self.root, self.mkdir, self.rmdir)

    def groups(self) -> list[str]:
        return sorted(
            folder.name for folder in self.mount.iterdir() if folder.name not in ("info", "schemata", "tasks")
        )


def test_shares() -> None:
    assert parse_shares("step=70,rest=30") == {"step": 70, "rest": 30}
    assert parse_shares("step=60") == {"step": 60, "rest": 40}
    assert parse_shares(" rest = 20 ") == {"rest": 20, "step": 80}
    for wrong, said in [
        ("", "got ''"),
        ("step", "got 'step'"),
        ("step=0", "got 'step=0'"),
        ("step=1.5", "got 'step=1.5'"),
        ("loss=3", "got 'loss=3'"),
        ("step=70,rest=40", "come to 110 per cent"),
        ("step=3,step=4", "step is given twice"),
    ]:
        with pytest.raises(UserError, match=f"--resctrl .*{said}"):
            parse_shares(wrong)


def test_schemata_lines() -> None:
    assert parse_schemata("    L3:0=fffff;1=ff\nMB:0= 100;1=  50\n L2:0=ff\n") == {
        "L3": {0: "fffff", 1: "ff"},
        "MB": {0: "100", 1: "50"},
        "L2": {0: "ff"},
    }
    assert schemata_line("L3", {1: "f", 0: "ff"}) == "L3:0=ff;1=f"
    for wrong in ("L3 0=f\n", "L3:0\n", "L3:a=f", "L3:", "L3:0="):
        with pytest.raises(ValueError, match="expected lines such as"):
            parse_schemata(wrong)


@pytest.mark.parametrize(
    ("mask", "least", "shares", "counts"),
    [
        (0xFFFFF, 1, [70, 30], [14, 6]),
        (0x7FF, 1, [50, 50], [5, 6]),
        (0xFFF, 2, [95, 5], [10, 2]),
        (0xF, 1, [99, 1], [3, 1]),
        (0xFF0, 1, [50, 50], [4, 4]),
        (0xFFFF, 1, [30, 20], [5, 3]),
    ],
)
def test_ways_are_disjoint_runs(mask: int, least: int, shares: list[int], counts: list[int]) -> None:
    masks = split_ways(mask, least, shares)
    assert [one.bit_count() for one in masks] == counts
    assert masks[0] & masks[1] == 0 and (masks[0] | masks[1]) & ~mask == 0
    for one in masks:
        assert "0" not in f"{one:b}".rstrip("0")  # no gap: Intel refuses one
    assert all(one.bit_count() >= least for one in masks)


def test_too_few_ways() -> None:
    with pytest.raises(ValueError, match="3 cache ways are too few for 2 parts of at least 2"):
        split_ways(0b111, 2, [50, 50])


def test_bandwidth_steps() -> None:
    assert [bandwidth_percent(share, 10, 10) for share in (1, 10, 11, 70, 99)] == [10, 10, 20, 70, 100]
    assert bandwidth_percent(30, 5, 8) == 32


def test_groups_are_made_and_removed(tmp_path: Path) -> None:
    tree = Tree(tmp_path, RDT, BOTH)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    alive = os.getppid()
    for name in (f"heavylift-{dead.stdout.strip()}-step", f"heavylift-{alive}-rest", "somebody-elses"):
        tree.mkdir(tree.mount / name)
    groups = tree.partitions()
    assert groups.make_groups({"step": 70, "rest": 30}) == []
    step, rest = groups.groups["step"], groups.groups["rest"]
    assert (step / "schemata").read_text() == "L3:0=3fff;1=3fff\nMB:0=70;1=70\n"
    assert (rest / "schemata").read_text() == "L3:0=fc000;1=fc000\nMB:0=30;1=30\n"
    # what a dead launcher left is gone, what others have stays
    kept = [f"heavylift-{alive}-rest", "somebody-elses"]
    assert tree.groups() == sorted([*kept, step.name, rest.name])
    groups.remove()
    assert tree.groups() == sorted(kept)
    groups.remove()


def test_code_and_data_apart_and_arm_without_bandwidth(tmp_path: Path) -> None:
    info = {name: {"cbm_mask": "ff", "min_cbm_bits": "1"} for name in ("L3CODE", "L3DATA")}
    tree = Tree(tmp_path, info, "L3CODE:0=ff\nL3DATA:0=ff\n")
    groups = tree.partitions()
    assert groups.make_groups({"step": 50, "rest": 50}) == [
        "memory bandwidth is not divided: this CPU or kernel has no MB control"
    ]
    assert (groups.groups["step"] / "schemata").read_text() == "L3CODE:0=f\nL3DATA:0=f\n"


def test_bandwidth_in_mbps_is_left_alone(tmp_path: Path) -> None:
    tree = Tree(tmp_path, RDT, "L3:0=fffff\nMB:0=4294967295\n", options="rw,relatime,mba_MBps")
    groups = tree.partitions()
    (left_out,) = groups.make_groups({"step": 50, "rest": 50})
    assert "mounted with mba_MBps" in left_out
    assert (groups.groups["rest"] / "schemata").read_text() == "L3:0=ffc00\n"


def test_what_can_be_missing(tmp_path: Path) -> None:
    with pytest.raises(NotAvailable, match="is not mounted"):
        Partitions(tmp_path)
    tree = Tree(tmp_path / "l2", {"L2": {"cbm_mask": "ff"}}, "L2:0=ff\n")
    with pytest.raises(NotAvailable, match="has no L3 control; .*has no MB control"):
        tree.partitions().make_groups({"step": 50, "rest": 50})
    full = Tree(tmp_path / "full", RDT, BOTH, groups=1)
    with pytest.raises(NotAvailable, match="all resource groups of this CPU are in use"):
        full.partitions().make_groups({"step": 50, "rest": 50})
    assert full.groups() == []  # the one that was made is taken down again

    def forbidden(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    user = Tree(tmp_path / "user", RDT, BOTH)
    with pytest.raises(NotAvailable, match="needs root"):
        Partitions(user.root, forbidden, user.rmdir).make_groups({"step": 50, "rest": 50})

    def refused(folder: Path) -> None:
        user.mkdir(folder)
        (folder / "schemata").unlink()
        (folder / "schemata").mkdir()  # cannot be written
        (user.mount / "info/last_cmd_status").write_text("mask is bad\n")

    with pytest.raises(NotAvailable, match=r"Is a directory \(mask is bad\)"):
        Partitions(user.root, refused, user.rmdir).make_groups({"step": 50, "rest": 50})
    assert user.groups() == []


def test_each_step_thread_is_moved_once(tmp_path: Path) -> None:
    tree = Tree(tmp_path, RDT, BOTH)
    groups = tree.partitions()
    groups.make_groups({"step": 50, "rest": 50})
    threads = [(11, "python"), (12, "heavylift-cpu"), (13, "heavylift-cpu"), (14, "pt_autograd_0")]
    assert groups.move_step_threads(threads) == 2
    assert groups.move_step_threads([*threads, (15, "heavylift-step"), (16, "heavylift-x")]) == 1
    assert (groups.groups["step"] / "tasks").read_text().split() == ["12", "13", "15"]


OPTIMIZER = """
import sys
import torch
from heavylift.config.schema import Schedule, Tier
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
options = TieredOptions(Tier.HOST, schedule=Schedule.DEFERRED, streamed_share=0.5, num_threads=2)
optimizer = TieredAdamW([torch.nn.Parameter(torch.zeros(4096))], options=options)
print(*optimizer.worker_threads, flush=True)
sys.stdin.read()
"""


def test_real_threads_of_the_cpu_step_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """A child with an optimizer, as a rank would be: the context's watcher moves its workers and the kernel's pool."""
    from heavylift.offload import native

    if native.load() is None:
        pytest.skip("no compiled kernel")
    tree = Tree(tmp_path, RDT, BOTH)
    monkeypatch.setattr(resctrl, "Partitions", lambda root: Partitions(tree.root, tree.mkdir, tree.rmdir))
    monkeypatch.setattr(resctrl, "_LOOK_EVERY_S", 0.05)
    tasks = tree.mount / f"heavylift-{os.getpid()}-step/tasks"
    with partitions("step=50"):
        rest = (tree.mount / f"heavylift-{os.getpid()}-rest/tasks").read_text()
        assert rest == f"{threading.get_native_id()}\n"  # whatever this thread starts inherits it
        child = subprocess.Popen(
            [sys.executable, "-c", OPTIMIZER], env=command_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert child.stdout is not None
            workers = [int(number) for number in child.stdout.readline().split()]
            for _ in range(1200):
                if len(tasks.read_text().split()) == 4:
                    break
                time.sleep(0.05)
            names = {number: name for number, name in threads_below(os.getpid()) if name.startswith("heavylift")}
            assert [names[number] for number in workers] == ["heavylift-step", "heavylift-bus"]
            assert sorted(names.values()) == ["heavylift-bus", "heavylift-cpu", "heavylift-cpu", "heavylift-step"]
            assert sorted(map(int, tasks.read_text().split())) == sorted(names)
        finally:
            child.communicate()
    assert tree.groups() == []
    assert capfd.readouterr().err == ""


class Busy(Tree):
    """Its groups cannot be removed."""

    def rmdir(self, folder: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(folder))


class Closed(Tree):
    """Nobody can be moved into its groups."""

    def mkdir(self, folder: Path) -> None:
        super().mkdir(folder)
        (folder / "tasks").unlink()
        (folder / "tasks").mkdir()


def _without(tree: Tree, file: str) -> None:
    (tree.mount / "info" / file).unlink()


@pytest.mark.parametrize(
    ("kind", "break_it", "lines"),
    [
        (
            Busy,
            None,
            ["heavylift-{pid}-rest is not removed: Device or resource busy; the next run tries again"]
            + ["heavylift-{pid}-step is not removed: Device or resource busy; the next run tries again"],
        ),
        (Closed, None, ["thread {tid} cannot be moved: Is a directory; the run goes on without"]),
        (
            Tree,
            lambda tree: _without(tree, "L3/cbm_mask"),
            ["L3 is not divided: {mount}/info/L3/cbm_mask: No such file or directory"],
        ),
        (
            Tree,
            lambda tree: (tree.mount / "info/MB/bandwidth_gran").write_text("some"),
            ["memory bandwidth is not divided: {mount}/info/MB/bandwidth_gran: expected a number, got 'some'"],
        ),
        (
            Tree,
            lambda tree: (tree.mount / "info/MB/bandwidth_gran").write_text("0"),
            ["memory bandwidth is not divided: it goes in steps of 0 per cent"],
        ),
        (
            Tree,
            lambda tree: (tree.mount / "info/L3/cbm_mask").write_text("f0f"),
            ["L3 is not divided: its ways are no run of neighbours (f0f)"],
        ),
        (
            Tree,
            lambda tree: (tree.mount / "schemata").write_text("L3:0\n"),
            ["{mount}/schemata: expected lines such as L3:0=ff;1=ff, got 'L3:0'; the run goes on without"],
        ),
        (
            Tree,
            lambda tree: (tree.mount / "schemata").unlink(),
            ["{mount}/schemata: No such file or directory; the run goes on without"],
        ),
        (
            Tree,
            lambda tree: (tree.mount / f"heavylift-{10**12}-step").mkdir(),
            [],
        ),
    ],
)
def test_a_run_is_good_whatever_resctrl_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: type[Tree],
    break_it: Callable[[Tree], object] | None,
    lines: list[str],
) -> None:
    tree = kind(tmp_path, RDT, BOTH)
    if break_it is not None:
        break_it(tree)
    monkeypatch.setattr(resctrl, "Partitions", lambda root: Partitions(tree.root, tree.mkdir, tree.rmdir))
    ran = []
    with partitions("step=50"):
        ran.append(1)
    assert ran == [1]
    said = capfd.readouterr().err.splitlines()
    words = {"pid": os.getpid(), "tid": threading.get_native_id(), "mount": tree.mount}
    assert len(said) == len(lines)
    for line, part in zip(said, lines, strict=True):
        assert line.startswith("note: --resctrl: ") and line.endswith(part.format(**words)), line


def test_a_mount_that_is_gone_at_the_end_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tree = Tree(tmp_path, RDT, BOTH)
    monkeypatch.setattr(resctrl, "Partitions", lambda root: Partitions(tree.root, tree.mkdir, tree.rmdir))
    with partitions("step=50"):
        tree.mount.rename(tree.mount.with_name("gone"))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: --resctrl: the groups are not removed: ") and "No such file" in line


def test_without_resctrl_the_run_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/mounts").write_text("proc /proc proc rw 0 0\n")
    ran: list[Callable[[], None] | int] = []
    with partitions("step=50", tmp_path):
        ran.append(1)
    assert ran == [1]
    assert capfd.readouterr().err == (
        "note: --resctrl: /sys/fs/resctrl is not mounted (mount -t resctrl resctrl /sys/fs/resctrl); "
        "the run goes on without\n"
    )
