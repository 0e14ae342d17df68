"""The launcher with real processes: exit codes, who is blamed, nobody left behind; and the division of cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import command_env
from processes import gone
from torch.distributed import DistNetworkError

from heavylift.config.schema import Recipe
from heavylift.errors import UserError
from heavylift.launch import binding, cores, quota
from heavylift.launch.runner import NodeRun, first_cause, run_node

# a worker that joins the process group, notes its process id and environment, then ends as told
WORKER = """
import os, signal, sys, time
how, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
threads = os.environ["OMP_NUM_THREADS"]
with open(f"{folder}/rank{rank}.tmp", "w") as file:
    file.write(f"{os.getpid()} {rank} {os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']} {threads}")
os.rename(f"{folder}/rank{rank}.tmp", f"{folder}/rank{rank}")
if how == "user":
    if rank == 0:
        print("error: this is wrong", file=sys.stderr)
    else:
        time.sleep(3)
    sys.exit(2)
if how == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "crash" and rank == 1:
    raise RuntimeError("boom in rank 1")
if how != "ok":
    time.sleep(300)
dist.destroy_process_group()
"""
LAUNCH = "import sys; from heavylift.launch.runner import launch_workers as l; sys.exit(l(2, sys.argv[1:], 'a_worker'))"
HERE = "import sys; from heavylift.launch.runner import run_here as r; sys.exit(r(sys.argv[1:], 'a_worker'))"

Launch = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts two workers that end as told; ends the launcher after the test."""
    (tmp_path / "a_worker.py").write_text(WORKER, encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    env = command_env(TMPDIR=str(tmp_path / "tmp"))
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    del env["OMP_NUM_THREADS"]
    started = []

    def start(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LAUNCH, how, str(tmp_path)]
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def notes(folder: Path) -> list[list[int]]:
    return [[int(part) for part in (folder / f"rank{rank}").read_text().split()] for rank in range(2)]


def wait_for_workers(folder: Path) -> list[int]:
    """Process ids of both workers once they have joined."""
    for _ in range(1200):
        if all((folder / f"rank{rank}").exists() for rank in range(2)):
            return [note[0] for note in notes(folder)]
        time.sleep(0.1)
    raise AssertionError("the workers did not start")


def test_all_ranks_run_and_nothing_stays(launch: Launch, tmp_path: Path) -> None:
    process = launch("ok")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    threads = max(1, cores.num_usable_cores() // 2)
    assert [note[1:] for note in notes(tmp_path)] == [[0, 2, 0, threads], [1, 2, 1, threads]]
    assert stderr == ""
    assert list((tmp_path / "tmp").iterdir()) == []


def test_user_error_keeps_its_code_and_its_one_line(launch: Launch) -> None:
    process = launch("user")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert stderr == "error: this is wrong\n"


@pytest.mark.parametrize(
    ("how", "rc", "said"),
    [
        ("killed", 137, "error: rank 1 of 2 was killed (SIGKILL)"),
        ("crash", 1, "error: rank 1 of 2 failed with exit code 1; its message is above"),
    ],
)
def test_a_dead_rank_ends_the_others_and_is_named(launch: Launch, tmp_path: Path, how: str, rc: int, said: str) -> None:
    process = launch(how)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == rc, stderr
    assert stderr.splitlines()[-1].startswith(said)
    assert ("boom in rank 1" in stderr) == (how == "crash")
    assert "ChildFailedError" not in stderr and "torch.distributed.elastic" not in stderr
    assert gone([note[0] for note in notes(tmp_path)], within_s=30)


def test_a_signal_to_the_launcher_ends_all_workers(launch: Launch, tmp_path: Path) -> None:
    """As the other signals do, SIGKILL too, for the ranks of a script: the same code (`test_launch_script.py`)."""
    number = signal.SIGINT
    process = launch("sleep")
    pids = wait_for_workers(tmp_path)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert stderr == f"ended by {number.name}; the workers are stopped\n"
    assert gone(pids, within_s=30)
    assert list((tmp_path / "tmp").iterdir()) == []


CTRL_C_AT_BIRTH = """
import os, signal
launcher = os.environ.get("HEAVYLIFT_LAUNCHER_PID")
if launcher == str(os.getppid()):
    os.kill(os.getpid(), signal.SIGINT)
    if os.environ["RANK"] == "0":
        os.kill(int(launcher), signal.SIGINT)
"""


def test_ctrl_c_while_ranks_come_to_life_is_one_line(launch: Launch, tmp_path: Path) -> None:
    """A terminal sends it to all of them; Python reads this file before any code of ours."""
    (tmp_path / "sitecustomize.py").write_text(CTRL_C_AT_BIRTH, encoding="utf-8")
    process = launch("sleep")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert stderr == "ended by SIGINT; the workers are stopped\n"
    assert not (tmp_path / "rank0").exists() and list((tmp_path / "tmp").iterdir()) == []


def test_under_torchrun_each_rank_works_in_place(tmp_path: Path) -> None:
    (tmp_path / "a_worker.py").write_text(WORKER, encoding="utf-8")
    (tmp_path / "here.py").write_text(HERE, encoding="utf-8")
    env = command_env()
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, tmp_path / "here.py", "ok", tmp_path], env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert [note[1:4] for note in notes(tmp_path)] == [[0, 2, 0], [1, 2, 1]]


def test_a_machine_that_cannot_start_ranks_is_not_asked_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise DistNetworkError("Failed to init uv loop")

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", refuse)
    with pytest.raises(UserError, match="^the ranks cannot be started on this machine: Failed to init uv loop$"):
        run_node(NodeRun(1, ("worker", "no_module")))


def test_first_cause() -> None:
    assert first_cause([(0, 1, 100), (1, -9, 100)]) == (1, -9)  # lost connection to a killed rank
    assert first_cause([(1, 2, 100), (0, 1, 100)]) == (1, 2)
    assert first_cause([(1, 1, 100), (0, -15, 100)]) == (1, 1)  # ended by the launcher
    assert first_cause([(1, 1, 100), (0, -9, 110)]) == (1, 1)  # by force, after ten seconds
    assert first_cause([(1, -15, 100), (0, -15, 100)]) == (1, -15)
    assert first_cause([(3, 1, 100), (0, 1, 100)]) == (3, 1)


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`bare_machine(n)`: a machine of n CPUs whose kernel says nothing more about them."""
    real = binding.read_topology

    def pretend(num_cpus: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cpus)))
        monkeypatch.setattr(quota, "cpu_quota", lambda: None)
        monkeypatch.setattr(binding, "read_topology", lambda allowed, root: real(allowed, tmp_path))

    return pretend


def test_shares_of_cores_are_disjoint_and_cover(bare_machine: Callable[[int], None]) -> None:
    bare_machine(7)
    shares = [cores.split_cores(rank, 3) for rank in range(3)]
    assert sorted(cpu for share in shares for cpu in share) == list(range(7))
    assert {len(share) for share in shares} == {2, 3}
    assert [len(cores.split_cores(rank, 9)) for rank in range(9)] == [1] * 9


def test_shares_follow_this_process_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    one = max(allowed)
    code = "from heavylift.launch.cores import *; print(split_cores(1, 2), num_usable_cores())"
    command = f"import os; os.sched_setaffinity(0, {{{one}}}); {code}"
    done = subprocess.run([sys.executable, "-c", command], env=command_env(), capture_output=True, text=True)
    assert done.stdout == f"[{one}] 1\n", done.stderr


def test_a_quota_shortens_the_shares(bare_machine: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bare_machine(8)
    monkeypatch.setattr(quota, "cpu_quota", lambda: 3.5)
    assert cores.num_usable_cores() == 4
    assert [len(cores.split_cores(rank, 2)) for rank in range(2)] == [2, 2]
    assert not set(cores.split_cores(0, 2)) & set(cores.split_cores(1, 2))
    assert cores.threads_per_rank(2) == 2


@pytest.mark.parametrize(
    ("cgroup", "files", "granted"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2.0),
        ("0::/host/path\n", {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4.0),
        (
            "5:cpu,cpuacct:/job\n0::/\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (
            "5:cpu,cpuacct:/job\n",
            {"sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000"},
            None,
        ),
        (None, {}, None),
    ],
)
def test_quota_of_the_control_group(
    tmp_path: Path, cgroup: str | None, files: dict[str, str], granted: float | None
) -> None:
    if cgroup is not None:
        files = {**files, "proc/self/cgroup": cgroup}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.cpu_quota(tmp_path) == granted


def recipe_with(nproc: int | str) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"model_name_or_path": "m"},
            "data": {"dataset": "d"},
            "train": {"output_dir": "o"},
            "launch": {"nproc": nproc},
        }
    )


def test_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "gpu_count", lambda: 0)
    monkeypatch.setattr(cores, "num_usable_cores", lambda: 16)
    assert cores.default_nproc(recipe_with("auto")) == 2
    assert cores.default_nproc(recipe_with(5)) == 5
    monkeypatch.setattr(cores, "num_usable_cores", lambda: 1)
    assert cores.default_nproc(recipe_with("auto")) == 1
    monkeypatch.setattr(cores, "gpu_count", lambda: 4)
    assert cores.default_nproc(recipe_with("auto")) == 4
    assert cores.default_nproc(recipe_with(3)) == 3
    with pytest.raises(cores.UserError, match=r"launch\.nproc: 5 processes, but 4 visible GPUs"):
        cores.default_nproc(recipe_with(5))
    monkeypatch.setattr(cores, "gpu_count", lambda: 1)
    with pytest.raises(cores.UserError, match=r"launch\.nproc: 2 processes, but 1 visible GPU;"):
        cores.default_nproc(recipe_with(2))
