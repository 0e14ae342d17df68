"""What started us, told by environment variables: nothing, torchrun, mpirun, srun, or a pod of Kubernetes.

Two kinds of answer: this process is one *rank* already (torchrun; mpirun; srun with a task per GPU), or it is to start
the ranks of one *node* (srun with a task per node; the variables of Kubernetes' training operator).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heavylift.errors import UserError
from heavylift.launch.options import DEFAULT_PORT
from heavylift.launch.slurm import job_nodes, job_port, port_of

_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rank:
    """This process is one rank; the variables that it needs, complete."""

    who: str
    variables: dict[str, str]


@dataclass(frozen=True)
class Node:
    """This process starts the ranks of one node."""

    who: str
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int


def surroundings(environment: Mapping[str, str] = os.environ) -> Rank | Node | None:
    """Who started this process, None if it stands alone. Raises UserError for variables that are not numbers."""
    if all(name in environment for name in _RANK):
        variables = {name: environment[name] for name in _RANK}
        local_world_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environment else "WORLD_SIZE"
        variables["LOCAL_WORLD_SIZE"] = environment[local_world_size]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", local_world_size):
            _number(environment, name)
        return Rank("torchrun", variables)
    mpi = _mpi_rank(environment)
    if mpi is not None:
        return mpi
    if _in_step(environment):
        return _slurm_node(environment) or _slurm_rank(environment)
    if "PET_NNODES" in environment and "PET_NODE_RANK" in environment:
        names = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
        return _node("Kubernetes (PET_*)", environment, *names)
    if "RANK" in environment and "WORLD_SIZE" in environment and "MASTER_ADDR" in environment:
        # the operator's older form: one RANK per pod
        return _node("Kubernetes (RANK)", environment, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return None


def foreign_rank(environment: Mapping[str, str]) -> Rank | None:
    """The rank that mpirun or srun has made of this process; None if neither did."""
    rank = _mpi_rank(environment)
    if rank is None and _in_step(environment):
        rank = _slurm_rank(environment)
    return rank


_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # Intel MPI's too


def _mpi_rank(environment: Mapping[str, str]) -> Rank | None:
    """One process of mpirun."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        names = _OPEN_MPI
    elif environment.get("PMI_SIZE", "1") != "1" and ("MPI_LOCALRANKID" in environment or not _in_step(environment)):
        names = _MPICH  # srun may set the first two
    else:
        return None
    rank, world_size, local_rank, local_world_size = (_number(environment, name) for name in names)
    if world_size != local_world_size and not environment.get("MASTER_ADDR"):
        raise UserError(
            "mpirun on several machines: MASTER_ADDR is not set; set it to the address of rank 0's host, with "
            "-x MASTER_ADDR=... (Open MPI) or -genv MASTER_ADDR ... (MPICH, Intel MPI)"
        )
    # two jobs on one machine need two ports
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    port = port_of(zlib.crc32(job.encode())) if job else DEFAULT_PORT
    return _rank("mpirun", environment, (rank, world_size, local_rank, local_world_size), "127.0.0.1", port)


def _in_step(environment: Mapping[str, str]) -> bool:
    # a batch script without srun knows of the job's tasks, and is none of them
    return "SLURM_PROCID" in environment and environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _slurm_node(environment: Mapping[str, str]) -> Node | None:
    """Where there is a task per node."""
    nodes = job_nodes(environment)
    if _number(environment, "SLURM_STEP_NUM_TASKS") != len(nodes):
        return None
    addr, port = _master(environment, nodes[0], job_port(environment))
    return Node("srun", _number(environment, "SLURM_NODEID"), len(nodes), addr, port)


def _slurm_rank(environment: Mapping[str, str]) -> Rank:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    rank, num_tasks, local_rank = (_number(environment, name) for name in names)
    here = _tasks_here(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(environment, "SLURM_NODEID"))
    first = job_nodes(environment)[0]
    return _rank("srun", environment, (rank, num_tasks, local_rank, here), first, job_port(environment))


def _rank(who: str, environment: Mapping[str, str], place: Sequence[int], addr: str, port: int) -> Rank:
    """`place`: rank, world size, and both on this machine."""
    values = (*place, *_master(environment, addr, port))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return Rank(who, {name: str(value) for name, value in zip(names, values, strict=True)})


def _master(environment: Mapping[str, str], addr: str, port: int) -> tuple[str, int]:
    """What the user has set comes first."""
    given = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else port
    return environment.get("MASTER_ADDR") or addr, given


def _tasks_here(text: str, node: int) -> int:
    """Tasks of this step on its node number `node`, from `4(x2),1`: 4, 4, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(
                f"environment variable SLURM_STEP_TASKS_PER_NODE: expected 4(x2),1 or the like, got {text!r}"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise UserError(f"environment variable SLURM_NODEID: node {node} of {len(counts)} (SLURM_STEP_TASKS_PER_NODE)")
    return counts[node]


def _node(who: str, environment: Mapping[str, str], rank: str, count: str, addr: str, port: str) -> Node | None:
    num_nodes = _number(environment, count)
    if num_nodes <= 1:
        return None
    if _number(environment, rank) >= num_nodes:
        raise UserError(f"{who}: {rank}={environment[rank]}, but there are {num_nodes} nodes ({count}), counted from 0")
    if not environment.get(addr):
        raise UserError(f"{who}: {count}={num_nodes}, but {addr} is not set; set it to the first node's address")
    node_port = _number(environment, port) if port in environment else DEFAULT_PORT
    return Node(who, _number(environment, rank), num_nodes, environment[addr], node_port)


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise UserError(f"environment variable {name}: expected a number, got {value!r}")
    return int(value)
