"""A script under mpirun or srun, without our launcher: their variables played, the processes real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import command_env

from heavylift.errors import UserError
from heavylift.launch.surroundings import foreign_rank

STEP = {"SLURM_JOB_ID": "123456", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
TASK = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
OPEN_MPI |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}

SCRIPT = """
import json, os
import torch
import deepspeed
deepspeed.init_distributed(verbose=False)
total = torch.ones(1)
deepspeed.comm.all_reduce(total)
print(json.dumps([os.environ[n] for n in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")] + [total.item()]))
"""


def place(environment: dict[str, str]) -> list[str]:
    """Rank, world size, both on this machine, address and port."""
    found = foreign_rank(environment)
    assert found is not None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return [found.variables[name] for name in names]


def test_who_this_process_is() -> None:
    assert foreign_rank({}) is None
    assert place(STEP | TASK) == ["1", "2", "0", "1", "n1", "23456"], "a task per node is a rank too"
    assert place(STEP | TASK | {"MASTER_PORT": "77", "MASTER_ADDR": "m"})[-2:] == ["m", "77"]
    assert place(STEP | TASK | {"PMI_RANK": "9", "PMI_SIZE": "9"})[:2] == ["1", "2"], "srun's own PMI"
    assert foreign_rank(STEP | {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None, "a batch script without srun"
    here = ["1", "2", "1", "2", "127.0.0.1"]
    assert place(OPEN_MPI) == [*here, "29500"] and place(MPICH) == [*here, "29500"]
    ports = {place(OPEN_MPI | {"PMIX_NAMESPACE": job})[-1] for job in ("prterun-a-1@1", "prterun-a-2@1")}
    assert len(ports) == 2 and all(20000 <= int(port) < 30000 for port in ports)
    assert place(MPICH | STEP | TASK)[:2] == ["1", "2"]


@pytest.mark.parametrize(("mpi", "local_size"), [(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), (MPICH, "MPI_LOCALNRANKS")])
def test_mpirun_on_several_machines_needs_an_address(mpi: dict[str, str], local_size: str) -> None:
    several = mpi | {local_size: "1"}
    with pytest.raises(UserError, match="MASTER_ADDR is not set; set it to the address of rank 0's host, with -x MAST"):
        foreign_rank(several)
    assert place(several | {"MASTER_ADDR": "m"})[-2] == "m"


def run_two(folder: Path, environments: Sequence[dict[str, str]]) -> list[list[object]]:
    """What each process of the script prints."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "heavylift.compat", str(script)]
    processes = [
        subprocess.Popen(command, env={**command_env(), **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for more in environments
    ]
    ended = [process.communicate(timeout=120) for process in processes]
    for process, (_, stderr) in zip(processes, ended, strict=True):
        assert process.returncode == 0, stderr.decode()
    return [json.loads(stdout) for stdout, _ in ended]


def test_two_processes_of_mpirun(tmp_path: Path) -> None:
    job = {"PMIX_NAMESPACE": f"job-{os.getpid()}"}
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    told = run_two(tmp_path, [OPEN_MPI | job | dict.fromkeys(names, str(rank)) for rank in range(2)])
    assert told == [[str(rank), str(rank), "2", "127.0.0.1", 2.0] for rank in range(2)]


def test_two_tasks_of_srun(tmp_path: Path) -> None:
    step = STEP | TASK | {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    step["SLURM_JOB_ID"] = str(os.getpid())
    told = run_two(tmp_path, [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)])
    assert told == [[str(rank), str(rank), "2", "localhost", 2.0] for rank in range(2)]


def test_an_address_that_is_missing_ends_the_script_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import heavylift\nheavylift.init_distributed()\n")
    environment = {**command_env(), **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "mpirun on several machines: MASTER_ADDR is not set" in ended.stderr
    assert "Traceback" not in ended.stderr
