"""`heavylift launch` on one machine with real ranks: what the script gets, how it ends, what is said of it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conftest import command_env
from processes import gone

from heavylift.cli.launch import is_launch_line, run_launch
from heavylift.errors import UserError
from heavylift.launch.pid_file import pid_file

ECHO = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
note = {"argv": sys.argv, "name": __name__, "path": sys.path[0], "env": {name: os.environ[name] for name in names}}
note["affinity"] = sorted(os.sched_getaffinity(0))
note["threads"] = os.environ["OMP_NUM_THREADS"]
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump(note, file)
# each in one write, which the other rank's cannot come into; print makes several
os.write(1, f"out of rank {os.environ['RANK']}\\n".encode())
os.write(2, f"err of rank {os.environ['RANK']}\\n".encode())
"""
SLEEP = """
import os, time
with open(f"rank{os.environ['RANK']}.tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"rank{os.environ['RANK']}.tmp", f"rank{os.environ['RANK']}.pid")
time.sleep(300)
"""
SCRIPT_DIES = """
import os, signal, sys, time
how = sys.argv[-1]
rank = int(os.environ["RANK"])
if rank == 0:
    time.sleep(300)
print("just before", file=sys.stderr)
if how == "raise":
    def deep():
        raise RuntimeError("boom in rank 1")
    deep()
if how == "abort":
    sys.stderr.flush()
    os.write(2, b"last words in C\\n")
    os.abort()
if how == "text":
    sys.exit("a last word")
sys.exit(int(how)) if how.isdigit() else os.kill(os.getpid(), signal.SIGKILL)
"""


STARTS_OTHERS = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()  # it is deaf from here on
fork = os.fork()
if fork == 0:
    time.sleep(600)
own_master = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open("own_master", "w") as file:
    file.write(str(own_master.pid))
with open("pids", "w") as file:
    file.write(f"{child.pid} {fork}")
os.kill(os.getpid(), signal.SIGKILL)
"""

USER_ERROR = """
import os, sys, torch
import torch.distributed as dist
import heavylift
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
if rank == 1 or sys.argv[-1] == "all":
    heavylift.zero.set_weights_source(torch.nn.Linear(2, 2), "nowhere")
dist.barrier()
"""


@dataclass(frozen=True)
class Ended:
    rc: int
    out: str
    err: str


Here = Callable[..., Ended]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """`here(*args)`: the launcher in this process (torch is loaded already), in a folder with the scripts above."""
    for name, text in (("echo_it.py", ECHO), ("sleep.py", SLEEP), ("dies.py", SCRIPT_DIES)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("ds.json", "recipe.yaml"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = command_env()
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> Ended:
        capfd.readouterr()
        rc = run_launch(args)
        out, err = capfd.readouterr()
        return Ended(rc, out, err)

    return run


def notes(folder: Path, num_ranks: int) -> list[dict]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def test_a_script_gets_what_deepspeeds_launcher_gives(here: Here, tmp_path: Path) -> None:
    ended = here("--num_gpus", "2", "echo_it.py", "--num_gpus", "7", "--", "-x")
    assert ended.rc == 0, ended.err
    found = notes(tmp_path, 2)
    for rank, note in enumerate(found):
        assert note["argv"] == ["echo_it.py", f"--local_rank={rank}", "--num_gpus", "7", "--", "-x"]
        assert note["name"] == "__main__" and note["path"] == str(tmp_path)
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        assert expected.items() <= note["env"].items() and note["env"]["LOCAL_SIZE"] == "2"
    assert found[0]["env"]["MASTER_PORT"] == found[1]["env"]["MASTER_PORT"]
    assert sorted(ended.out.split("\n")) == ["", "out of rank 0", "out of rank 1"]
    said = sorted(ended.err.splitlines())
    assert said == ["err of rank 0", "err of rank 1", "note: no GPU is visible: 2 processes on the CPU"]
    assert list((tmp_path / "tmp").iterdir()) == []  # neither pipes nor logs stay
    assert "HEAVYLIFT_LAUNCHER_PID" not in os.environ


def test_module_port_quiet_and_bound_cores(here: Here, tmp_path: Path) -> None:
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))
    wanted = ["--module", "--no_local_rank", "--master-port", str(port), "-q", "--num_accelerators=2"]
    ended = here(*wanted, "--bind_core_list", ",".join(map(str, cores)), "echo_it", "a")
    assert (ended.rc, ended.err.count("note:")) == (0, 0), ended.err
    found = notes(tmp_path, 2)
    assert [note["argv"][1:] for note in found] == [["a"], ["a"]]
    assert {note["env"]["MASTER_PORT"] for note in found} == {str(port)}
    shares = [set(note["affinity"]) for note in found]
    if len(cores) > 1:
        assert shares[0] | shares[1] == set(cores) and not shares[0] & shares[1]
    assert all(int(note["threads"]) <= len(share) for note, share in zip(found, shares, strict=True))


def test_program_without_python(here: Here, tmp_path: Path) -> None:
    (tmp_path / "prog.sh").write_text('#!/bin/sh\necho "$1 $2 of $WORLD_SIZE"\n')
    (tmp_path / "prog.sh").chmod(0o755)
    ended = here("--no_python", "--num_gpus", "1", "./prog.sh", "x")
    assert (ended.rc, ended.out) == (0, "--local_rank=0 x of 1\n"), ended.err


def test_as_deepspeed(here: Here, tmp_path: Path) -> None:
    pytest.importorskip("heavylift.compat")
    (tmp_path / "theirs.py").write_text("import deepspeed\nprint(deepspeed.initialize.__module__)\n")
    ended = here("-q", "--as-deepspeed", "--num_gpus", "1", "theirs.py")
    assert ended.rc == 0, ended.err
    assert ended.out.startswith("heavylift.")
    without = here("-q", "--num_gpus", "1", "theirs.py")
    assert without.out != ended.out
    if importlib.util.find_spec("deepspeed") is None:
        assert without.rc == 1 and "`heavylift launch --as-deepspeed` (before the script)" in without.err


def test_include_chooses_slots(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    ended = here("-H", "hosts", "-i", "localhost:1,3", "--num_gpus", "-1", "echo_it.py")
    assert ended.rc == 0 and len(ended.out.splitlines()) == 2
    assert "note: --num_gpus -1: as DeepSpeed does, taken as not given\n" in ended.err


@pytest.mark.parametrize(
    ("how", "rc", "said", "last"),
    [
        ("raise", 1, "failed with exit code 1; its last lines:", "RuntimeError: boom in rank 1"),
        ("7", 7, "failed with exit code 7; its last lines:", "just before"),
        ("text", 1, "failed with exit code 1; its last lines:", "a last word"),
        ("abort", 134, "was killed (SIGABRT); its last lines:", "last words in C"),
        ("kill", 137, "was killed (SIGKILL)", None),
    ],
)
def test_first_failure_is_shown_and_its_code_kept(
    here: Here, tmp_path: Path, how: str, rc: int, said: str, last: str | None
) -> None:
    ended = here("--num_gpus=2", "dies.py", how)
    assert ended.rc == rc, ended.err
    lines = ended.err.splitlines()
    report = next(index for index, line in enumerate(lines) if line.startswith("error: "))
    assert lines[report].startswith(f"error: rank 1 of 2 {said}")
    if last is not None:
        assert lines[-1] == f"  | {last}" and f"{last}\n" in ended.err[: ended.err.index("error: ")]
    assert all(line.startswith("  | ") for line in lines[report + 1 :])
    if how == "raise":  # the script's own frames only
        assert "runpy" not in ended.err and "entry.py" not in ended.err and "in deep" in ended.err
    assert not [child for child in psutil.Process().children(recursive=True) if "dies.py" in child.cmdline()]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_a_failed_rank_has_started_ends_too(here: Here, tmp_path: Path) -> None:
    """Deaf to SIGTERM or not; what has left the rank's session is its own master."""
    (tmp_path / "starts.py").write_text(STARTS_OTHERS)
    ended = here("-q", "--num_gpus=2", "--no_local_rank", "starts.py")
    pids = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    own_master = int((tmp_path / "own_master").read_text())
    still = [pid for pid in pids if not gone([pid], within_s=0.1)]
    own_master_lives = psutil.pid_exists(own_master)
    for pid in {*still, own_master}:
        os.kill(pid, signal.SIGKILL)
    assert (ended.rc, still, own_master_lives) == (137, [], True), ended.err
    assert len(pids) == 2


@pytest.mark.parametrize(("who", "prefix"), [("all", ""), ("one", "rank 1: ")])
def test_a_user_error_is_one_line_whoever_makes_it(here: Here, tmp_path: Path, who: str, prefix: str) -> None:
    """Neither a line per rank, nor the ranks that only lost their connection, nor a summary of the same."""
    (tmp_path / "wrong.py").write_text(USER_ERROR)
    ended = here("-q", "--num_gpus", "2", "wrong.py", who)
    (line,) = ended.err.splitlines()
    assert ended.rc == 2 and line.startswith(f"error: {prefix}wrong.py:8: zero.set_weights_source: "), line


def test_each_rank_has_its_log(here: Here, tmp_path: Path) -> None:
    ended = here("--enable_each_rank_log", "logs/new", "--num_gpus", "2", "echo_it.py")
    assert ended.rc == 0 and ended.out == "" and "err of rank" not in ended.err
    assert re.search(r"note: each rank writes to .*/logs/new/\d{14}_rankN.log", ended.err)
    for rank in range(2):
        (file,) = (tmp_path / "logs/new").glob(f"*_rank{rank}.log")
        assert sorted(file.read_text().splitlines()) == [f"err of rank {rank}", f"out of rank {rank}"]
    ended = here("--enable_each_rank_log", "logs/two", "--num_gpus", "2", "dies.py", "raise")
    assert ended.rc == 1 and ended.err.splitlines()[-1] == "  | RuntimeError: boom in rank 1"


def test_scripts_exit_handlers_and_threads_run(here: Here, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(
        "import atexit, threading, time\n"
        "atexit.register(lambda: print('at exit'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread done'))).start()\n"
    )
    ended = here("-q", "--num_gpus", "1", "ends.py")
    assert (ended.rc, ended.out) == (0, "thread done\nat exit\n")


def test_processes_that_a_script_spawns_find_its_functions(here: Here, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(
        "import multiprocessing\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    ended = here("-q", "--num_gpus", "1", "spawns.py")
    assert (ended.rc, ended.out) == (0, "[2, 4]\n"), ended.err


def occupied() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        yield int(taken.getsockname()[1])


port_in_use = pytest.fixture(occupied)


def test_port_in_use(here: Here, port_in_use: int) -> None:
    with pytest.raises(UserError, match=rf"^--master_port: port {port_in_use} is in use on this machine; give another"):
        here("--num_gpus", "1", "--master_port", str(port_in_use), "echo_it.py")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothere.py"], "nothere.py: there is no such script"),
        (["--module", "no_such_module_here"], "--module no_such_module_here: Python finds no module"),
        (["--no_python", "no-such-program"], "no-such-program: there is no such program"),
        (["--module", "--no_python", "echo_it.py"], "--module and --no_python cannot be used together"),
        (["--num_gpus", "0", "echo_it.py"], "--num_gpus 0: expected at least 1"),
        (["--num_gpus", "99999999999", "echo_it.py"], "--num_gpus 99999999999: expected at most 99999"),
        (["--num_gpus", "two", "echo_it.py"], "argument --num_gpus/--num-gpus.*invalid int value: 'two'"),
        (["--num_nodes", "2", "echo_it.py"], "--num_nodes 2: there is no hostfile"),
        (["--master_port", "70000", "echo_it.py"], "--master_port 70000: expected a port"),
        (["--launcher", "openmpi", "echo_it.py"], "--launcher openmpi: MPI is not called from here; use ssh"),
        (["--launcher", "slrum", "echo_it.py"], "--launcher slrum: expected one of ssh, pdsh, slurm"),
        (["--elastic_training", "echo_it.py"], "--elastic_training: elastic training is not there"),
        (["--autotuning", "tune", "echo_it.py"], "--autotuning: there is no autotuning"),
        (["--include", "elsewhere", "echo_it.py"], "--include elsewhere: unknown host 'elsewhere'; known: localhost"),
        (["--include", "localhost:999", "echo_it.py"], "--include localhost:999: host localhost has slots 0 to .* 999"),
        (["--hostfile", "nowhere", "echo_it.py"], "--hostfile nowhere: cannot be read: No such file or directory"),
        (["--bind_core_list", "0-", "echo_it.py"], "--bind_core_list '0-': '0-' is neither a number nor a range"),
        (["--no_ssh", "echo_it.py"], "--no_ssh: give --node_rank"),
        (["--node_rank", "2", "--num_nodes", "2", "echo_it.py"], "--node_rank 2: there are 2 nodes"),
        (["--node_rank", "0", "--num_nodes", "2", "echo_it.py"], "--no_ssh: give --master_addr"),
        (["--resctrl", "stop=3", "echo_it.py"], "--resctrl 'stop=3': expected per cents"),
        (
            ["--enable_each_rank_log", "echo_it.py", "echo_it.py"],
            "--enable_each_rank_log echo_it.py: expected a folder",
        ),
        (["--world_info", "x", "echo_it.py"], "--world_info: this flag is for the launcher's own use"),
        (["--log_level", "loud", "echo_it.py"], "--log_level loud: expected one of"),
        (["--launcher_args", "'", "echo_it.py"], "--launcher_args"),
        ([], "no script is given: heavylift launch \\[flags\\] script.py; see"),
        (["-q"], "no script is given"),
        (["ds.json"], r"ds.json: expected a Python script; .*--deepspeed_config ds.json"),
        (["recipe.yaml"], "recipe.yaml: expected a Python script; for a recipe: heavylift train recipe.yaml"),
        (["tmp"], "tmp: this is a folder, and has no __main__.py; give the script in it"),
        (["--num_gpu", "2", "echo_it.py"], r"unrecognized arguments: --num_gpu \(did you mean --num_gpus\?\); see"),
        (["--as-deepsped", "echo_it.py"], r"unrecognized arguments: --as-deepsped \(did you mean --as-deepspeed\?\)"),
        (["--xyzzy", "echo_it.py"], "unrecognized arguments: --xyzzy; see"),
    ],
)
def test_mistakes_are_one_line(here: Here, arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        here(*arguments)
    assert re.search(f"^(heavylift launch: )?{said}", str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_gpus_than_there_are(here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("heavylift.launch.start.gpu_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(
        UserError, match=r"^--num_gpus 8: this machine has 4 visible GPUs \(CUDA_VISIBLE_DEVICES=0,1,2,3\)"
    ):
        here("--num_gpus", "8", "echo_it.py")
    (tmp_path / "hosts").write_text("localhost slots=8\n")
    with pytest.raises(UserError, match="^host localhost: slot 4 is to be used, but 4 GPUs are visible there"):
        here("-H", "hosts", "echo_it.py")


def test_lines_that_are_the_launchers() -> None:
    for line in (["--num_gpus", "4", "x.py"], ["--num_gpus=4", "x.py"], ["-H", "h", "x.py"], ["train.py"]):
        assert is_launch_line(line)
    for line in ([], ["train", "r.yaml"], ["--version"], ["--help"], ["launch", "x.py"]):
        assert not is_launch_line(line)


def command(folder: Path, *args: str) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    argv = [sys.executable, "-m", "heavylift", *args]
    env = command_env(TMPDIR=str(folder / "tmp"))
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_ranks(folder: Path, num_ranks: int = 2) -> list[int]:
    """Process ids of the ranks of SLEEP."""
    files = [folder / f"rank{rank}.pid" for rank in range(num_ranks)]
    for _ in range(2400):
        if all(file.exists() for file in files):
            return [int(file.read_text()) for file in files]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_nobody(here: Here, tmp_path: Path, number: signal.Signals) -> None:
    process = command(tmp_path, "--num_gpus", "2", "--save_pid", "sleep.py")
    try:
        ranks = wait_for_ranks(tmp_path)
        file = tmp_path / "tmp" / pid_file(process.pid).name
        assert file.read_text() == str(process.pid)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        assert gone(ranks)
        if number != signal.SIGKILL:
            assert process.returncode == 128 + number
            assert f"ended by {number.name}; the workers are stopped" in err and "Traceback" not in err
            assert list((tmp_path / "tmp").iterdir()) == []
    finally:
        process.kill()


def test_under_nohup_a_closed_terminal_ends_nothing(here: Here, tmp_path: Path) -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as from nohup
    try:
        process = command(tmp_path, "--num_gpus", "1", "sleep.py")
    finally:
        signal.signal(signal.SIGHUP, old)
    try:
        ranks = wait_for_ranks(tmp_path, 1)
        process.send_signal(signal.SIGHUP)  # would be seen first
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM and gone(ranks)
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_the_others(here: Here, tmp_path: Path, number: signal.Signals) -> None:
    process = command(tmp_path, "launch", "--num_gpus", "2", "sleep.py")
    try:
        ranks = wait_for_ranks(tmp_path)
        os.kill(ranks[1], number)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 128 + number and gone(ranks)
        assert err.splitlines()[-1].startswith(f"error: rank 1 of 2 was killed ({number.name})")
        assert "Traceback" not in err
    finally:
        process.kill()


def test_a_mistake_on_the_command_line_is_exit_code_2_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['heavylift', '--num_gpus', '2', 'nothere.py']\n"
        "from heavylift.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=command_env(), capture_output=True, text=True)
    assert done.stdout == "2 False\n"
    assert done.stderr == f"error: nothere.py: there is no such script (in {tmp_path})\n"


def test_a_script_to_source_is_not_passed_over_on_one_machine(here: Here, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        here("--num_gpus", "2", "--venv_script", "nope", "echo_it.py")
    assert str(raised.value) == (
        "--venv_script nope: sourced before a launcher that ssh or srun starts, and this run starts none; leave it "
        "out, and source it before this command"
    )
    assert not (tmp_path / "rank0.json").exists()
