"""Several machines: hostfiles and filters, ssh and srun played by scripts on PATH that run the command right here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import command_env
from processes import gone

from heavylift.errors import UserError
from heavylift.launch.failures import Told
from heavylift.launch.hostfile import choose, read_hostfile
from heavylift.launch.multinode import forwarded_environment, read_environment_file, remote_line
from heavylift.launch.node_errors import NodeStderr, hand_up
from heavylift.launch.options import parse_options
from heavylift.launch.placement import parse_places
from heavylift.launch.slurm import expand_nodes, job_nodes, srun_command
from heavylift.launch.start import _become_rank, _own_cores
from heavylift.launch.surroundings import Node, Rank, surroundings

# notes its arguments, then runs the last one as sshd would: with a shell, and with a bare environment
FAKE_SSH = """#!{python}
import json, os, sys
with open(os.environ["FAKE_SSH_LOG"], "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
host, line = sys.argv[-2:]
if host == "node-down":
    print("ssh: connect to host node-down port 22: No route to host", file=sys.stderr)
    sys.exit(255)
if line == "hostname -I":
    line = "echo 127.0.0.1 10.9.8.7"
kept = {{name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR")}}
os.chdir("/")
os.execve("/bin/sh", ["sh", "-c", line], {{**kept, "AM_ON": host}})
"""
# srun: one task per node, with the variables that a step has
FAKE_SRUN = """#!{python}
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
with open(os.environ["FAKE_SSH_LOG"], "a") as log:
    log.write(repr(sys.argv[1:]))
nodes = next(word for word in options if word.startswith("--nodelist=")).split("=")[1].split(",")
command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
tasks = []
for node, name in enumerate(nodes):
    step = {{"SLURM_STEP_NUM_TASKS": str(len(nodes)), "SLURM_STEP_NODELIST": ",".join(nodes)}}
    step |= {{"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0", "AM_ON": name}}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **step, "MASTER_ADDR": "127.0.0.1"}}))
sys.exit(max(task.wait() for task in tasks))
"""
TRAIN = """
import json, os, sys, time
rank = int(os.environ["RANK"])
total = None
if "--sum" in sys.argv:
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total)
    total = total.tolist()
    dist.destroy_process_group()
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "AM_ON", "NCCL_DEBUG", "FROM_FILE", "MASTER_ADDR", "CROSS_RANK")
note = {name: os.environ.get(name) for name in names}
note |= {"total": total, "argv": sys.argv[1:], "cwd": os.getcwd(), "pid": os.getpid()}
with open(f"rank{rank}.tmp", "w") as file:
    json.dump(note, file)
os.rename(f"rank{rank}.tmp", f"rank{rank}.json")
if "--wrong" in sys.argv and (rank == 1 or "--all" in sys.argv):
    from heavylift.errors import UserError
    while not os.path.exists(f"rank{1 - rank}.json"):
        time.sleep(0.05)
    raise UserError("this is wrong", f"so is that of rank {rank}")
if "--die" in sys.argv and rank == 1:
    while not os.path.exists("rank0.json"):
        time.sleep(0.05)
    if "--255" in sys.argv:
        sys.exit(-1)
    raise RuntimeError("boom on the second node")
if {"--die", "--sleep", "--wrong"} & set(sys.argv):
    time.sleep(300)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with train.py, a hostfile of two nodes with one slot each, and ssh and srun that are played."""
    for name, text in (("ssh", FAKE_SSH), ("srun", FAKE_SRUN)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text.format(python=sys.executable), encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "work" / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "work" / "hosts").write_text("node-a slots=1\nnode-b slots=1\n", encoding="utf-8")
    return tmp_path / "work"


@pytest.fixture
def launch(cluster: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command in the cluster's folder; ends it after the test."""
    started = []

    def start(*args: str, **more: str) -> subprocess.Popen[str]:
        env = command_env(
            PATH=f"{cluster.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
            FAKE_SSH_LOG=str(cluster.parent / "log"),
            TMPDIR=str(cluster.parent / "tmp"),
            **more,
        )
        argv = [sys.executable, "-m", "heavylift", "launch", *args]
        process = subprocess.Popen(
            argv, cwd=cluster, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def notes(folder: Path) -> list[dict]:
    """What both ranks noted, once they have."""
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    for _ in range(2400):
        if all(file.exists() for file in files):
            return [json.loads(file.read_text()) for file in files]
        time.sleep(0.05)
    raise AssertionError("the ranks did not come so far")


def test_two_nodes_train_together_over_ssh(cluster: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    (cluster / ".deepspeed_env").write_text("FROM_FILE=a value with 'quotes'\n# comment\nNCCL_DEBUG=WARN\n")
    flags = ["-H", "hosts", "--ssh_port", "2222", "--launcher_args=-o Compression=yes", "--master_port", free_port()]
    process = launch(*flags, "train.py", "--two words", "--sum", NCCL_DEBUG="INFO", SECRET="stays here")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = notes(cluster)
    for rank, note in enumerate(found):
        assert note["total"] == [3.0, 3.0, 3.0]
        assert (note["RANK"], note["LOCAL_RANK"], note["WORLD_SIZE"]) == (str(rank), "0", "2")
        assert (note["AM_ON"], note["CROSS_RANK"]) == (("node-a", "node-b")[rank], str(rank))
        # the file's value over the environment's; node-a is a name that only ssh knows: it was asked for its address
        assert (note["NCCL_DEBUG"], note["FROM_FILE"], note["MASTER_ADDR"]) == (
            "WARN",
            "a value with 'quotes'",
            "127.0.0.1",
        )
        assert note["argv"] == ["--local_rank=0", "--two words", "--sum"] and note["cwd"] == str(cluster)
    calls = [json.loads(line) for line in (cluster.parent / "log").read_text().splitlines()]
    assert all(call[:2] == ["-p", "2222"] and "Compression=yes" in call for call in calls)
    assert sorted(call[-2] for call in calls if call[-1] == "true") == ["node-a", "node-b"]
    assert "SECRET" not in (cluster.parent / "log").read_text()
    assert list((cluster.parent / "tmp").iterdir()) == []


def test_a_failure_on_one_node_ends_the_other(cluster: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    flags = ["-H", "hosts", "--no_ssh_check", "--master_addr", "127.0.0.1", "--master_port", free_port()]
    process = launch(*flags, "train.py", "--die")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert gone([note["pid"] for note in notes(cluster)])
    assert "error: rank 1 of 2 failed with exit code 1; its last lines:" in err
    assert any(line.startswith("  | ") and line.endswith("boom on the second node") for line in err.splitlines())
    assert err.splitlines()[-1] == "error: host node-b failed; the other hosts' ranks are ended"
    assert "ended by SIGTERM" not in err


@pytest.mark.parametrize(
    ("by", "whose"), [("ssh", "all"), ("srun", "all"), pytest.param("ssh", "one", marks=pytest.mark.soak)]
)
def test_a_user_error_of_every_node_is_said_once(
    cluster: Path, launch: Callable[..., subprocess.Popen[str]], by: str, whose: str
) -> None:
    flags, job = ["-H", "hosts", "--no_ssh_check", "--master_addr", "127.0.0.1"], {}
    if by == "srun":
        flags, job = ["--launcher", "slurm"], {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[07-08]"}
    process = launch(*flags, "--master_port", free_port(), "-q", "train.py", "--wrong", f"--{whose}", **job)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    number = next(number for number, text in enumerate(TRAIN.splitlines(), 1) if "raise UserError" in text)
    # the ranks come there at about the same time; one that comes late is ended before it can say anything
    said = [line.replace("error: rank 1: ", "error: ") for line in err.splitlines()]
    assert said.count(f"error: train.py:{number}: this is wrong") == 1 and len(set(said)) == len(said)
    assert set(said[1:]) <= {f"error: train.py:{number}: so is that of rank {rank}" for rank in range(2)}
    if whose == "one":
        assert len(said) == 2 and all(line.startswith("error: rank 1: ") for line in err.splitlines())


def test_a_host_without_the_script_is_named(cluster: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    """There the launcher itself has something to say, which any host could have said."""
    (cluster / "activate").write_text('if [ "$AM_ON" = node-b ]; then mkdir -p other && cd other; fi\n')
    with (cluster / "activate").open("a") as file:
        file.write(f"export PATH={Path(sys.executable).parent}:$PATH\n")
    flags = ["-H", "hosts", "--no_ssh_check", "--master_addr", "127.0.0.1", "--venv_script", "./activate", "-q"]
    process = launch(*flags, "--master_port", free_port(), "train.py", "--sleep")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert err.splitlines() == [
        f"error: train.py: there is no such script (in {cluster / 'other'})",
        "error: host node-b failed; the other hosts' ranks are ended",
    ]


def test_marked_lines_are_taken_out_however_they_come(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = [Told(3, 1.5, 2, ("one", "é\ntwo")), Told(0, 2.5, 2, ("one",)), Told(1, 3.5, 1)]
    hand_up(told)
    marked = capfd.readouterr().err.encode()
    text = b"50%\r 60%" + marked + b"a\x1eb \x1eheavylift is\n\x1e"
    for size in (1, 3, 7, 1000):
        (tmp_path / str(size)).mkdir()
        stderr = NodeStderr(str(tmp_path / str(size)), 2)
        with stderr:
            for start in range(0, len(text), size):
                stderr._pass(1, text[start : start + size])  # as its thread does, which pipes would leave the sizes to
        assert stderr.told == told[:2] and stderr.nodes == {1}
        assert capfd.readouterr().err == "50%\r 60%a\x1eb \x1eheavylift is\n\x1e"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_ranks_of_every_node(
    cluster: Path, launch: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    (cluster / "hosts").write_text("localhost slots=1\nnode-b slots=1\n")
    (cluster / "activate").write_text(f"export FROM_FILE=venv PATH={Path(sys.executable).parent}:$PATH\n")
    flags = ["-H", "hosts", "--no_ssh_check", "--master_addr", "127.0.0.1", "--master_port", free_port()]
    more = ["--force_multi", "--venv_script", "./activate"] if number == signal.SIGKILL else []
    process = launch(*flags, *more, "train.py", "--sleep")
    found = notes(cluster)
    pids = [note["pid"] for note in found]
    # no ssh to this machine itself, unless it is forced
    assert [note["AM_ON"] for note in found] == ["localhost" if more else None, "node-b"]
    assert [note["FROM_FILE"] for note in found] == ["venv" if more else None] * 2
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert gone(pids)
    if number == signal.SIGTERM:
        assert process.returncode == 143
        assert err.splitlines()[-1] == "ended by SIGTERM; the workers of all hosts are stopped"


def test_a_host_that_ssh_does_not_reach_is_named(cluster: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    (cluster / "hosts").write_text("node-a slots=1\nnode-down slots=1\n")
    process = launch("-H", "hosts", "--master_addr", "127.0.0.1", "--master_port", free_port(), "train.py")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.splitlines() == [
        "error: host node-down: ssh failed: ssh: connect to host node-down port 22: No route to host; "
        "'ssh node-down true' must work without a password"
    ]


def test_without_the_check_a_host_that_ssh_does_not_reach_is_named_too(
    cluster: Path, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    (cluster / "hosts").write_text("node-a slots=1\nnode-down slots=1\n")
    flags = ["-H", "hosts", "--no_ssh_check", "--master_addr", "127.0.0.1", "--master_port", free_port()]
    process = launch(*flags, "train.py")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith("error: host node-down: ssh failed or lost its connection")


def test_a_scripts_own_255_is_not_taken_for_sshs(cluster: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    flags = ["-H", "hosts", "--no_ssh_check", "--master_addr", "127.0.0.1", "--master_port", free_port()]
    process = launch(*flags, "train.py", "--die", "--255")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 255, err
    assert err.splitlines()[-1] == "error: host node-b failed; the other hosts' ranks are ended"


def test_nodes_started_by_hand(cluster: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    flags = ["--no_ssh", "--num_nodes", "2", "--master_addr", "127.0.0.1", "--master_port", free_port()]
    both = [launch(*flags, "--node_rank", str(rank), "train.py", "--sum") for rank in range(2)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert [note["total"] for note in notes(cluster)] == [[3.0, 3.0, 3.0]] * 2
    assert not (cluster.parent / "log").exists()  # no ssh


def test_srun_starts_a_launcher_per_node(cluster: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[07-09]"}
    flags = ["--launcher", "slurm", "--exclude", "gpu08", "--master_port", free_port()]
    process = launch(*flags, "--launcher_args=--mem=0", "train.py", "x", **job)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = notes(cluster)
    assert [note["AM_ON"] for note in found] == ["gpu07", "gpu09"]
    assert [(note["RANK"], note["WORLD_SIZE"]) for note in found] == [("0", "2"), ("1", "2")]
    assert "'--nodelist=gpu07,gpu09'" in (cluster.parent / "log").read_text()
    assert "'--mem=0'" in (cluster.parent / "log").read_text()


def test_under_torchrun_every_process_is_a_rank(cluster: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = [*torchrun, "-m", "heavylift", "launch", "--num_gpus", "2", "train.py", "--sum"]
    done = subprocess.run(argv, cwd=cluster, env=command_env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = notes(cluster)
    assert [note["argv"] for note in found] == [["--local_rank=0", "--sum"], ["--local_rank=1", "--sum"]]
    assert [note["total"] for note in found] == [[3.0, 3.0, 3.0]] * 2
    assert done.stderr.count("started by torchrun") == 1


def test_cores_of_a_rank_that_others_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun has given this task a core of its own; torchrun has left all ranks all cores."""
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {core})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    plain, bound = parse_options(["s.py"]), parse_options(["--bind_cores_to_rank", "s.py"])
    for options in (plain, bound):
        given = _own_cores(options, 4)
        assert given["HEAVYLIFT_BIND"] == "0"
        assert [place.cpus for place in parse_places(given["HEAVYLIFT_PLACES"])] == [(core,)] * 4
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert _own_cores(plain, 2) == {}
    assert _own_cores(bound, 2)["HEAVYLIFT_BIND"] == "1"


def test_a_task_that_sees_too_few_gpus_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank("srun", {"RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})
    monkeypatch.setattr("heavylift.launch.start.gpu_pci_ids", lambda: ["0000:01:00.0"])
    with pytest.raises(UserError, match="^srun: local rank 3 sees 1 GPU; .*--gpus-per-node instead of --gpus-per-task"):
        _become_rank(parse_options(["s.py"]), rank)


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# nodes\nworker-1 slots=4\n\n10.0.0.2   slots=8  # new\n")
    assert read_hostfile(path) == {"worker-1": 4, "10.0.0.2": 8}
    path.write_text("a slots=2\nb 4\na slots=2\nc slots=0\nd slots=-1\n")
    with pytest.raises(UserError) as caught:
        read_hostfile(path)
    assert caught.value.problems == (
        f"{path}:2: expected 'host slots=n', got 'b 4'",
        f"{path}:3: host a stands in line 1 already; give it once",
        f"{path}:4: host c has no slots; give it one per GPU or remove the line",
        f"{path}:5: expected 'host slots=n', got 'd slots=-1'",
    )
    path.write_text("a slots=99999999999\n")
    with pytest.raises(UserError, match="hosts:1: expected 'host slots=n', got 'a slots=99999999999'"):
        read_hostfile(path)
    path.write_text("# nothing\n")
    with pytest.raises(UserError, match="names no host"):
        read_hostfile(path)


HOSTS = {"a": 4, "b": 4, "c": 2}


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3], "c": [0, 1]}),
        ({"include": "b:0,2@c"}, {"b": [0, 2], "c": [0, 1]}),
        ({"include": "c:1@a:3,0-1"}, {"c": [1], "a": [3, 0, 1]}),
        ({"exclude": "a@b:1-2"}, {"b": [0, 3], "c": [0, 1]}),
        ({"num_nodes": 2, "num_gpus": 3}, {"a": [0, 1, 2], "b": [0, 1, 2]}),
    ],
)
def test_choice_of_slots(given: dict, chosen: dict) -> None:
    found = choose(HOSTS, **given)
    assert found == chosen and list(found) == list(chosen)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"include": "a", "exclude": "b"}, "--include and --exclude cannot be used together"),
        ({"include": "a", "num_gpus": 1}, "--include cannot be used together with --num_gpus"),
        ({"exclude": "a", "num_nodes": 1}, "--exclude cannot be used together with --num_nodes"),
        ({"include": "d:0"}, "--include d:0: unknown host 'd'; known: a, b, c"),
        ({"include": "c:1,2"}, "--include c:1,2: host c has slots 0 to 1, not 2"),
        ({"include": "c:"}, "--include c:: expected slots such as c:0,2 or c:0-3, got 'c:'"),
        ({"include": "c:0-99999999999"}, "--include c:0-99999999999: expected slots such as c:0,2 or c:0-3"),
        ({"include": "a:0@a:1"}, "--include a:0@a:1: host a is named twice"),
        ({"include": "a:0,0"}, "--include a:0,0: a slot of host a is named twice"),
        ({"exclude": "a@b@c"}, "--exclude a@b@c: nothing is left to run on"),
        ({"num_nodes": 4}, "--num_nodes 4: there are 3 hosts (a, b, c)"),
        ({"num_gpus": 3}, "--num_gpus 3: host c has 2 slots"),
    ],
)
def test_wrong_choices(given: dict, said: str) -> None:
    with pytest.raises(UserError) as caught:
        choose(HOSTS, **given)
    assert caught.value.problems[0].startswith(said)


def test_one_mistake_is_told_once() -> None:
    with pytest.raises(UserError) as caught:
        choose(HOSTS, include="@")
    assert caught.value.problems == ("--include @: unknown host ''; known: a, b, c",)


def test_environment_for_the_nodes(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_DISABLE=1\nmy key=2\n")
    with pytest.raises(UserError, match=r"\.deepspeed_env:2: expected KEY=VALUE, got 'my key=2'"):
        read_environment_file({}, [tmp_path])
    (tmp_path / "other").write_text("A=b=c\n\n")
    assert read_environment_file({"DS_ENV_FILE": "other"}, [tmp_path, tmp_path / "nowhere"]) == {"A": "b=c"}
    ours = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "PASSWORD": "p", "HEAVYLIFT_PLACES": "[]", "HEAVYLIFT_DEBUG": "1"}
    assert forwarded_environment(ours, {"PYTHONPATH": "/y"}) == {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/y",
        "HEAVYLIFT_DEBUG": "1",
    }


def test_remote_line_is_what_a_shell_wants(tmp_path: Path) -> None:
    (tmp_path / "venv script").write_text("export FROM_VENV=yes\n")
    variables = {"A": "it's $HOME"}
    line = remote_line(str(tmp_path), variables, "./venv script", ["sh", "-c", 'echo "$PWD|$A|$FROM_VENV"'])
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert done.stdout == f"{tmp_path}|it's $HOME|yes\n", done.stderr


def test_slurm_node_lists() -> None:
    assert expand_nodes("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert expand_nodes("r[1-2]-ib") == ["r1-ib", "r2-ib"] and expand_nodes("one") == ["one"]
    for wrong in ("gpu[01-", "gpu[a-b]"):
        with pytest.raises(UserError, match="cannot be read"):
            expand_nodes(wrong)
    assert srun_command(["a", "b"], ["-x"], ["cmd"])[-2:] == ["-x", "cmd"]
    with pytest.raises(UserError, match="--launcher slurm: not in a SLURM job"):
        job_nodes({})


STEP = {"SLURM_JOB_ID": "123456", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "1", "SLURM_PROCID": "1"}


def test_surroundings() -> None:
    assert surroundings({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "1"}
    assert surroundings({**torchrun, "LOCAL_WORLD_SIZE": "2"}) == Rank(
        "torchrun", {**torchrun, "LOCAL_WORLD_SIZE": "2"}
    )
    assert surroundings({**STEP, "SLURM_STEP_NUM_TASKS": "2"}) == Node("srun", 1, 2, "n1", 23456)
    per_gpu = {**STEP, "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    assert surroundings({**per_gpu, "SLURM_STEP_TASKS_PER_NODE": "4,2"}) == Rank(
        "srun",
        {
            "RANK": "5",
            "WORLD_SIZE": "6",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "23456",
        },
    )
    assert surroundings({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0", "PET_MASTER_PORT": "23456"}
    assert surroundings(pet) == Node("Kubernetes (PET_*)", 1, 2, "pod-0", 23456)
    pod = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}
    assert surroundings(pod) == Node("Kubernetes (RANK)", 1, 3, "pod-0", 23456)
    assert surroundings({**pod, "WORLD_SIZE": "1"}) is None
    mpi = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
    mpi |= {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    found = surroundings(mpi)
    assert isinstance(found, Rank) and found.variables["WORLD_SIZE"] == found.variables["LOCAL_WORLD_SIZE"] == "4"
    assert (found.variables["MASTER_ADDR"], found.variables["MASTER_PORT"]) == ("127.0.0.1", "29500")
    with pytest.raises(UserError, match="mpirun on several machines: MASTER_ADDR is not set"):
        surroundings({**mpi, "OMPI_COMM_WORLD_SIZE": "8"})
    with pytest.raises(UserError, match="environment variable PET_NNODES: expected a number, got '1:2'"):
        surroundings({**pet, "PET_NNODES": "1:2"})
    with pytest.raises(UserError, match="PET_MASTER_ADDR is not set"):
        surroundings({**pet, "PET_MASTER_ADDR": ""})


def test_pdsh_means_ssh_and_dashes_do_for_underscores() -> None:
    options = parse_options(["--launcher", "pdsh", "--bind-cores-to-rank", "--no-local-rank", "s.py", "--module"])
    assert options.launcher == "ssh" and options.bind_cores and options.no_local_rank and not options.module
    assert options.script_args == ("--module",)
    written_out = [
        "--num_gpus=-1",
        "--num_nodes",
        "-1",
        "--node_rank=-1",
        "--include=",
        "--exclude",
        "",
        "--master_addr=",
    ]
    options = parse_options([*written_out, "s.py"])
    given = (
        options.num_gpus,
        options.num_nodes,
        options.node_rank,
        options.include,
        options.exclude,
        options.master_addr,
    )
    assert given == (None,) * 6
