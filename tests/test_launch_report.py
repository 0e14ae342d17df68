"""Who is blamed, what a SIGKILL was about, and the ends of outputs."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import command_env

import heavylift.api
from heavylift.api import script_errors
from heavylift.errors import UserError
from heavylift.launch import deaths, failures
from heavylift.launch.oom import OomCount, explain_kill, read_oom_count
from heavylift.launch.rank_output import RankStderr, end_of_file, last_lines
from heavylift.launch.report import RankFailure, report, show_user_errors, with_told


def test_first_failure_by_the_time_that_ranks_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # both seen in the same second; rank 1 raised first, rank 0 only lost its connection
    seen = [RankFailure(0, 0, 1, 100.0), RankFailure(1, 1, 1, 100.0)]
    for rank, when in ((0, 100.9), (1, 100.1)):
        note = {"rank": rank, "seconds": when, "code": 1, "lines": []}
        (tmp_path / f"failed.{rank}").write_text(json.dumps(note))
    told = with_told(seen, failures.read_told(tmp_path))
    assert report(told, 2, (none, none), lambda failure: [f"tail of {failure.rank}"]) == 1
    assert capfd.readouterr().err == "error: rank 1 of 2 failed with exit code 1; its last lines:\n  | tail of 1\n"
    assert report(told, 2, (none, none), lambda failure: []) == 1
    assert capfd.readouterr().err == "error: rank 1 of 2 failed with exit code 1\n"


none = OomCount(None, None, None)


def test_a_sigterm_that_was_first_is_not_the_launchers(capfd: pytest.CaptureFixture[str]) -> None:
    seen = [RankFailure(0, 0, -signal.SIGTERM, 100.2, True), RankFailure(1, 1, -signal.SIGTERM, 100.1, True)]
    assert report(seen, 2, (none, none), None) == 143
    assert capfd.readouterr().err == "error: rank 1 of 2 was killed (SIGTERM)\n"
    # a rank that then lost its connection; without the moments it would be blamed
    lost = [RankFailure(0, 0, 1, 100.2, True), RankFailure(1, 1, -signal.SIGTERM, 100.1, True)]
    assert report(lost, 2, (none, none), None) == 143
    assert report([replace(failure, seconds=100.0, observed=False) for failure in lost], 2, (none, none), None) == 1
    # the launcher's own, after rank 0 had failed
    ended = [RankFailure(0, 0, 1, 100.1, True), RankFailure(1, 1, -signal.SIGTERM, 100.2, True)]
    assert report(ended, 2, (none, none), None) == 1


def test_of_those_that_one_look_found_dead_a_sigterm_was_not_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A busy machine: the launcher has ended rank 0 before anybody saw that rank 1 was killed."""
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for local_rank, (process, number) in enumerate(zip(processes, (signal.SIGTERM, signal.SIGKILL), strict=True)):
        process.send_signal(number)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        (tmp_path / f"pid.{local_rank}").write_text(str(process.pid))
    watch = deaths.DeathWatch(tmp_path, 2)
    watch._watch()  # until both are noted
    codes = [process.wait() for process in processes]
    assert watch.seconds[0] == watch.seconds[1]
    seen = [RankFailure(rank, rank, code, watch.seconds[rank], True) for rank, code in enumerate(codes)]
    assert report(seen, 2, (none, none), None) == 137
    assert capfd.readouterr().err.startswith("error: rank 1 of 2 was killed (SIGKILL)")


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_rank_that_came_and_died_during_one_wait_is_not_after_the_one_that_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_for: bool
) -> None:
    """Rank 1 fails in its first milliseconds, and the launcher ends rank 0 before the watch has looked again."""
    monkeypatch.setattr(deaths, "_LOOK_S", 600.0)  # one wait, which only rank 0's end ends
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    (tmp_path / "pid.0").write_text(str(processes[0].pid))
    with deaths.DeathWatch(tmp_path, 2) as watch:
        while not watch._known:
            time.sleep(0.001)
        time.sleep(0.1)
        (tmp_path / "pid.1").write_text(str(processes[1].pid))
        for local_rank, number in ((1, signal.SIGABRT), (0, signal.SIGTERM)):
            processes[local_rank].send_signal(number)
            if waited_for or local_rank == 0:
                processes[local_rank].wait()
            else:
                os.waitid(os.P_PID, processes[1].pid, os.WEXITED | os.WNOWAIT)
        while len(watch.seconds) < 2:
            time.sleep(0.001)
    codes = [process.wait() for process in processes]
    assert watch.seconds[0] == watch.seconds[1]
    seen = [RankFailure(rank, rank, code, watch.seconds[rank], True) for rank, code in enumerate(codes)]
    assert report(seen, 2, (none, none), lambda failure: []) == 134


def test_deaths_are_noted_in_their_order_whoever_waits_for_them(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    with deaths.DeathWatch(tmp_path, 3) as watch:
        for local_rank, process in enumerate(processes):
            (tmp_path / f"pid.{local_rank}").write_text(str(process.pid))
        for local_rank in (2, 0):
            processes[local_rank].kill()
            processes[local_rank].wait()
            end = time.monotonic() + 60
            while local_rank not in watch.seconds and time.monotonic() < end:
                time.sleep(0.01)
        seconds = dict(watch.seconds)
    processes[1].kill()
    processes[1].communicate()
    assert list(seconds) == [2, 0] and seconds[2] <= seconds[0]


def test_a_rank_tells_for_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not failures.tell(2, ["nobody listens"]) and not failures.another_has_a_user_error()
    monkeypatch.setattr(failures, "_claim", failures._Claim())
    for name, value in (("HEAVYLIFT_FAILURES", str(tmp_path)), ("RANK", "5"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    failures.claim_folder()
    assert "HEAVYLIFT_FAILURES" not in os.environ  # a script that this one starts is no rank
    assert failures.tell(2, ["one", "two"])
    told = failures.read_told(tmp_path)
    assert list(told) == [1] and (told[1].rank, told[1].code, told[1].lines) == (5, 2, ("one", "two"))
    assert not failures.another_has_a_user_error()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert failures.another_has_a_user_error()
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    assert not failures.tell(2, ["not mine"])


def test_what_a_script_calls_first_shows_its_mistakes_as_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hook is there with the first import from the api, before `initialize`."""
    other: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: other.append(kind))
    monkeypatch.setattr(script_errors._OneLine, "is_installed", False)
    for name in ("RANK", "HEAVYLIFT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    importlib.reload(heavylift.api)
    with pytest.raises(SystemExit) as left:
        sys.excepthook(UserError, UserError("one: in\ntwo lines", "two"), None)
    assert left.value.code == 2 and capfd.readouterr().err == "error: one: in two lines\nerror: two\n"
    sys.excepthook(KeyError, KeyError("k"), None)
    assert other == [KeyError]
    monkeypatch.setenv("HEAVYLIFT_DEBUG", "1")
    sys.excepthook(UserError, UserError("shown whole"), None)
    assert other == [KeyError, UserError] and capfd.readouterr().err == ""


def test_user_errors_are_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    told = [failures.Told(rank, 100.0 + rank, 2, lines) for rank, lines in enumerate([("a",), ("a", "b"), ("b", "c")])]
    show_user_errors(told[::-1])
    assert capfd.readouterr().err == "error: a\nerror: rank 1: b\nerror: rank 2: c\n"


def test_a_rank_with_a_user_error_explains_those_that_lost_it(capfd: pytest.CaptureFixture[str]) -> None:
    # rank 0 was seen first, and rank 1 ended by the launcher before it could leave with its own code
    seen = [RankFailure(0, 0, 1, 103.0), RankFailure(1, 1, -signal.SIGTERM, 103.0)]
    told = {0: failures.Told(0, 102.9, 1), 1: failures.Told(1, 100.0, 2, ("wrong",))}
    assert report(with_told(seen, told), 2, (none, none), lambda failure: ["Traceback"], on_screen=True) == 2
    assert capfd.readouterr().err == ""
    # the other way round: what rank 0 says is only that rank 1 is gone
    told = {0: failures.Told(0, 102.9, 2, ("a rank has left",)), 1: failures.Told(1, 100.0, 1)}
    seen = [RankFailure(0, 0, 2, 103.0), RankFailure(1, 1, 1, 103.0)]
    assert report(with_told(seen, told), 2, (none, none), lambda failure: ["ValueError"], on_screen=True) == 1
    assert capfd.readouterr().err.startswith("error: rank 1 of 2 failed with exit code 1; its last lines:")


def test_a_user_error_that_was_on_the_screen_is_not_said_again(capfd: pytest.CaptureFixture[str]) -> None:
    failed = [RankFailure(0, 0, 2, 100.0)]
    said = ["loading", "error: ds.json: zero_optimization.stage: expected 0 to 3, got 7"]
    assert report(failed, 1, (none, none), lambda failure: said, on_screen=True) == 2
    assert capfd.readouterr().err == ""
    # in a log file nobody has seen it; and what a script's own argument parser says is not ours
    assert report(failed, 1, (none, none), lambda failure: said) == 2
    assert "failed with exit code 2; its last lines:" in capfd.readouterr().err
    assert report(failed, 1, (none, none), lambda failure: ["usage: train.py [-h]"], on_screen=True) == 2
    assert "failed with exit code 2; its last lines:" in capfd.readouterr().err


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "12884901888\n"}
V1 = {
    "proc/self/cgroup": "4:memory:/elsewhere\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize(
    ("files", "counter", "text", "said"),
    [
        (
            V2,
            "sys/fs/cgroup/job/memory.events",
            "low 0\noom 3\noom_kill {}\n",
            ": out of memory, the kernel ended it at the control group's limit of 12.0 GiB",
        ),
        (
            V1,  # in a container: the group is found at the mount point, and it has no limit
            "sys/fs/cgroup/memory/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
            ": out of memory, the kernel ended it at the control group's limit",
        ),
        (
            {},
            "proc/vmstat",
            "pgfault 7\noom_kill {}\n",
            ": out of memory, the kernel ended a process because the machine's memory was full",
        ),
    ],
)
def test_a_kill_for_memory_is_told_from_others(
    tmp_path: Path, files: dict[str, str], counter: str, text: str, said: str
) -> None:
    write(tmp_path, {**files, counter: text.format(4)})
    before = read_oom_count(tmp_path)
    nothing = read_oom_count(tmp_path)
    assert explain_kill(before, nothing).startswith("; the kernel counted no kill for memory")
    write(tmp_path, {counter: text.format(5)})
    assert explain_kill(before, read_oom_count(tmp_path)) == said


def test_without_counters_it_is_a_question(tmp_path: Path) -> None:
    assert explain_kill(read_oom_count(tmp_path), read_oom_count(tmp_path)) == ": out of memory?"


KILLED_FOR_MEMORY = """
import os, pathlib, signal, sys
pathlib.Path(sys.argv[1]).write_text("oom_kill 1\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_killed_for_memory_is_named_as_such(tmp_path: Path) -> None:
    """A real rank that counts itself as the kernel would before it is killed."""
    write(tmp_path, {**V2, "sys/fs/cgroup/job/memory.events": "oom_kill 0\n", "dies.py": KILLED_FOR_MEMORY})
    events = str(tmp_path / "sys/fs/cgroup/job/memory.events")
    code = (
        "import sys; from pathlib import Path; from heavylift.launch.runner import NodeRun, run_node\n"
        f"run = NodeRun(1, ('script', {str(tmp_path / 'dies.py')!r}, {events!r}))\n"
        f"sys.exit(run_node(run, Path({str(tmp_path)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=command_env(), capture_output=True, text=True)
    assert done.returncode == 137
    assert done.stderr == (
        "error: rank 0 of 1 was killed (SIGKILL): out of memory, the kernel ended it at the control group's limit "
        "of 12.0 GiB\n"
    )


def test_last_lines() -> None:
    written = b"one\n\ntwo\r\n 10%\r 50%\r100%\nthree \xff\n\n"
    assert last_lines(written, 9) == ["one", "two", "100%", "three �"]
    assert last_lines(written, 2) == ["100%", "three �"]
    assert last_lines(b"", 3) == []


def test_ends_of_files(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 20000 + b"end")
    assert end_of_file(str(tmp_path / "log")) == (b"x" * 20000 + b"end")[-16384:]
    assert end_of_file(str(tmp_path / "none")) == b""


def test_pipes_pass_on_everything_and_keep_the_end(tmp_path: Path) -> None:
    target = os.open(tmp_path / "all", os.O_WRONLY | os.O_CREAT)
    with RankStderr(str(tmp_path), 2, target) as stderr:
        writers = [open(tmp_path / f"stderr.{rank}", "wb", buffering=0) for rank in range(2)]
        for _ in range(50):
            for rank, writer in enumerate(writers):
                writer.write(str(rank).encode() * 1000)
        writers[1].write(b"last of 1")
        for writer in writers:
            writer.close()
    os.close(target)
    written = (tmp_path / "all").read_bytes()
    assert (written.count(b"0"), len(written)) == (50000, 100009)
    assert stderr.end(1).endswith(b"1last of 1") and set(stderr.end(0)) == {ord("0")}
    assert len(stderr.end(0)) == 16384
    stderr.close()


def test_on_a_terminal_the_ranks_have_one(tmp_path: Path) -> None:
    screen, target = os.openpty()
    with RankStderr(str(tmp_path), 1, target) as stderr:
        code = (
            "from heavylift.launch.rank_output import worker_redirect; worker_redirect(); import sys\n"
            "print(sys.stderr.isatty(), file=sys.stderr)"
        )
        env = command_env(HEAVYLIFT_STDERR_PIPES=str(tmp_path), LOCAL_RANK="0")
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert stderr.end(0) == b"True\n"
    assert os.read(screen, 100) == b"True\r\n"  # one carriage return, not two
    os.close(screen)
    os.close(target)
