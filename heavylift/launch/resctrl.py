"""Parts of the L3 cache and of the memory bandwidth for the CPU step's threads and for the rest of a run.

Where the kernel has it (RDT on Intel, the same on AMD, MPAM on Arm) and `/sys/fs/resctrl` is mounted, two groups are
made at start and removed at the end; groups that a killed launcher left behind are removed by the next one. Whoever the
launcher starts inherits its own group, the rest; a thread watches for the step's threads and moves them. It needs root.
Where something is missing one line says so and the run goes on without. Left out: L2, monitoring groups.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from heavylift.launch.resctrl_schemata import (
    PARTS,
    bandwidth_percent,
    parse_schemata,
    parse_shares,
    schemata_line,
    split_ways,
)
from heavylift.offload.thread_names import STEP_THREADS

RESCTRL_VARIABLE = "HEAVYLIFT_RESCTRL"
"""As `--resctrl`: `step=70,rest=30`."""
_LOOK_EVERY_S = 1.0
_OURS = re.compile(r"heavylift-(\d{1,9})-(?:step|rest)")


class NotAvailable(Exception):
    """Resource control cannot be used here; the message says why."""


class Partitions:
    """The two groups of one launcher. `make_groups` first; `remove` takes everything down again."""

    def __init__(
        self,
        root: Path = Path("/"),
        mkdir: Callable[[Path], None] = os.mkdir,
        rmdir: Callable[[Path], None] = os.rmdir,
    ) -> None:
        """Raises NotAvailable when resctrl is not mounted. `mkdir`, `rmdir`: make and remove a group."""
        self._mkdir, self._rmdir = mkdir, rmdir
        mount = _mount_point(root)
        if mount is None:
            raise NotAvailable("/sys/fs/resctrl is not mounted (mount -t resctrl resctrl /sys/fs/resctrl)")
        self._mount, self._in_mbps = mount
        self._made: list[Path] = []
        self._moved: set[int] = set()

    @property
    def groups(self) -> dict[str, Path]:
        """Folder of each part."""
        return {part: self._mount / f"heavylift-{os.getpid()}-{part}" for part in PARTS}

    def make_groups(self, shares: dict[str, int]) -> list[str]:
        """Makes the groups and gives them their parts. Returns what had to be left out, one line each.

        Raises NotAvailable; nothing stays behind then.
        """
        with self._locked():
            try:
                self._remove_stale()
                lines, left_out = self._schemata(shares)
                for part, folder in self.groups.items():
                    self._mkdir(folder)
                    self._made.append(folder)
                    for line in lines[part]:
                        _write(folder / "schemata", line)
            except OSError as error:
                raise NotAvailable("; ".join([self._why(error), *self._remove_made()])) from None
            except ValueError as error:
                raise NotAvailable(f"{self._mount / 'schemata'}: {error}") from None
        return left_out

    def move(self, part: str, thread_id: int) -> bool:
        """Puts one thread into a part. False if it has ended meanwhile. Raises NotAvailable when it cannot be moved."""
        try:
            _write(self.groups[part] / "tasks", str(thread_id))
        except OSError as error:
            if error.errno == errno.ESRCH:
                return False
            raise NotAvailable(f"thread {thread_id} cannot be moved: {error.strerror}") from None
        return True

    def move_step_threads(self, threads: Iterable[tuple[int, str]]) -> int:
        """Moves those of (thread id, name) that compute the CPU step, each once. Returns how many were moved now.

        Raises NotAvailable when one cannot be moved.
        """
        fresh = [number for number, name in threads if name in STEP_THREADS and number not in self._moved]
        moved = [number for number in fresh if self.move("step", number)]
        self._moved.update(moved)
        return len(moved)

    def remove(self) -> list[str]:
        """Removes the groups; the kernel puts their threads back into the default group.

        Returns a line for each that stays.
        """
        if not self._made:
            return []
        try:
            with self._locked():
                return self._remove_made()
        except NotAvailable as error:
            return [f"the groups are not removed: {error}"]

    def _schemata(self, shares: dict[str, int]) -> tuple[dict[str, list[str]], list[str]]:
        """Lines for each part, and what is left out."""
        current = parse_schemata((self._mount / "schemata").read_text())
        caches = [name for name in ("L3", "L3CODE", "L3DATA") if name in current]
        lines: dict[str, list[str]] = {part: [] for part in PARTS}
        left_out = []
        for cache in caches:
            try:
                mask, least = self._info(cache, "cbm_mask", 16), self._info(cache, "min_cbm_bits")
                masks = split_ways(mask, least, [shares[part] for part in PARTS])
            except ValueError as error:
                left_out.append(f"{cache} is not divided: {error}")
                continue
            for part, ways in zip(PARTS, masks, strict=True):
                lines[part].append(schemata_line(cache, dict.fromkeys(current[cache], f"{ways:x}")))
        if not caches:
            left_out.append("the cache is not divided: this CPU or kernel has no L3 control")
        if "MB" not in current:
            left_out.append("memory bandwidth is not divided: this CPU or kernel has no MB control")
        elif self._in_mbps:
            left_out.append(
                "memory bandwidth is not divided: resctrl is mounted with mba_MBps, which takes no per cents"
            )
        else:
            try:
                least, step = self._info("MB", "min_bandwidth"), self._info("MB", "bandwidth_gran")
                percents = [bandwidth_percent(shares[part], least, step) for part in PARTS]
            except ValueError as error:
                left_out.append(f"memory bandwidth is not divided: {error}")
            else:
                for part, percent in zip(PARTS, percents, strict=True):
                    lines[part].append(schemata_line("MB", dict.fromkeys(current["MB"], str(percent))))
        if not any(lines.values()):
            raise NotAvailable("; ".join(left_out))
        return lines, left_out

    def _info(self, resource: str, name: str, base: int = 10) -> int:
        """What the kernel tells about a resource. Raises ValueError where that is missing or no number."""
        file = self._mount / "info" / resource / name
        try:
            text = file.read_text()
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from None
        try:
            return int(text, base)
        except ValueError:
            raise ValueError(f"{file}: expected a number, got {text.strip()!r}") from None

    def _remove_stale(self) -> None:
        """Groups of launchers that are no more."""
        for folder in self._mount.iterdir():
            match = _OURS.fullmatch(folder.name)
            if match and (int(match[1]) == os.getpid() or not psutil.pid_exists(int(match[1]))):
                try:
                    self._rmdir(folder)
                except OSError:  # not ours to remove, or gone: making our own will say what is wrong
                    pass

    def _remove_made(self) -> list[str]:
        """Returns a line for each group that stays."""
        stays = []
        while self._made:
            folder = self._made.pop()
            try:
                self._rmdir(folder)
            except FileNotFoundError:  # unmounted meanwhile
                pass
            except OSError as error:
                stays.append(f"{folder} is not removed: {error.strerror}; the next run tries again")
        return stays

    def _why(self, error: OSError) -> str:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return "no permission to make a group in /sys/fs/resctrl (it needs root)"
        if error.errno == errno.ENOSPC:
            return "all resource groups of this CPU are in use (num_closids); remove some below /sys/fs/resctrl"
        try:
            status = (self._mount / "info" / "last_cmd_status").read_text().strip()
        except (OSError, ValueError):
            status = ""
        return f"{error.filename or self._mount}: {error.strerror}{f' ({status})' if status else ''}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The kernel's documented lock between programs that change resctrl: flock on the mount point."""
        try:
            folder = os.open(self._mount, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise NotAvailable(self._why(error)) from None
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
            except OSError as error:
                raise NotAvailable(f"{self._mount} cannot be locked: {error.strerror}") from None
            yield
        finally:
            os.close(folder)


@contextmanager
def partitions(spec: str, root: Path = Path("/")) -> Iterator[None]:
    """While the context lasts, this run has its parts as `spec` (`step=70,rest=30`) says.

    Raises UserError for a bad `spec`. Where resource control is missing a line on stderr says so.
    """
    groups = _begin(parse_shares(spec), root)
    if groups is None:
        yield
        return
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(groups, ended), name="resctrl", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        _say(groups.remove())


def _begin(shares: dict[str, int], root: Path) -> Partitions | None:
    """The groups, made, with the calling thread in the rest; None, said on stderr, where that cannot be."""
    groups = None
    try:
        groups = Partitions(root)
        left_out = groups.make_groups(shares)
        # this thread starts the workers, and they inherit its group
        groups.move("rest", threading.get_native_id())
    except NotAvailable as error:
        _say([f"{error}; the run goes on without", *([] if groups is None else groups.remove())])
        return None
    _say(left_out)
    return groups


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"note: --resctrl: {line}", file=sys.stderr)


@contextmanager
def partitions_from_environment() -> Iterator[None]:
    """As `partitions` with the environment variable HEAVYLIFT_RESCTRL; without it nothing happens."""
    spec = os.environ.get(RESCTRL_VARIABLE, "")
    if not spec:
        yield
        return
    with partitions(spec):
        yield


def threads_below(pid: int) -> Iterator[tuple[int, str]]:
    """(thread id, name) of all threads of a process's descendants."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return
    for child in children:
        try:
            tasks = list(Path(f"/proc/{child.pid}/task").iterdir())
        except OSError:
            continue
        for task in tasks:
            try:
                yield int(task.name), (task / "comm").read_text().strip()
            except OSError:
                continue


def _watch(groups: Partitions, ended: threading.Event) -> None:
    """The step's threads start when the optimizer is built, and are named then."""
    while not ended.wait(_LOOK_EVERY_S):
        try:
            groups.move_step_threads(threads_below(os.getpid()))
        except NotAvailable as error:
            _say([str(error)])
            return


def _mount_point(root: Path) -> tuple[Path, bool] | None:
    """Where resctrl is mounted, and whether its bandwidth is given in MiB per second."""
    try:
        lines = (root / "proc/mounts").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if len(fields) >= 4 and fields[2] == "resctrl":
            return root / fields[1].lstrip("/"), "mba_MBps" in fields[3].split(",")
    return None


def _write(file: Path, line: str) -> None:
    # appended: the kernel does not care, and it keeps what was there in a tree of ordinary files
    with open(file, "a", encoding="ascii") as stream:
        stream.write(line + "\n")
