"""What started us, told by environment variables: nothing, torchrun, mpirun, srun, or a pod of Kubernetes.

Two kinds of answer: this process is one *rank* already (torchrun; mpirun; srun with a task per GPU), or it is to start
the ranks of one *node* (srun with a task per node; the variables of Kubernetes' training operator).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from heavylift.errors import UserError
from heavylift.launch.slurm import job_nodes, job_port

_DEFAULT_PORT = 29500  # torch's and DeepSpeed's
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
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _mpi_rank(environment)
    if "SLURM_PROCID" in environment and environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _slurm_step(environment)
    if "PET_NNODES" in environment and "PET_NODE_RANK" in environment:
        names = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
        return _node("Kubernetes (PET_*)", environment, *names)
    if "RANK" in environment and "WORLD_SIZE" in environment and "MASTER_ADDR" in environment:
        # the operator's older form: one RANK per pod
        return _node("Kubernetes (RANK)", environment, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return None


def _mpi_rank(environment: Mapping[str, str]) -> Rank:
    """One process of Open MPI's mpirun."""
    names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    variables = {name: str(_number(environment, f"OMPI_COMM_WORLD_{theirs}")) for name, theirs in names.items()}
    several = variables["WORLD_SIZE"] != variables["LOCAL_WORLD_SIZE"]
    if several and not environment.get("MASTER_ADDR"):
        raise UserError(
            "mpirun on several machines: MASTER_ADDR is not set; add -x MASTER_ADDR=address of rank 0's host"
        )
    variables["MASTER_ADDR"] = environment.get("MASTER_ADDR", "127.0.0.1")
    variables["MASTER_PORT"] = environment.get("MASTER_PORT", str(_DEFAULT_PORT))
    return Rank("mpirun", variables)


def _slurm_step(environment: Mapping[str, str]) -> Rank | Node:
    num_tasks, node = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_NODEID")
    nodes = job_nodes(environment)
    addr = environment.get("MASTER_ADDR") or nodes[0]
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else job_port(environment)
    if num_tasks == len(nodes):
        return Node("srun", node, len(nodes), addr, port)
    variables = {
        "RANK": str(_number(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(_tasks_here(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node)),
        "MASTER_ADDR": addr,
        "MASTER_PORT": str(port),
    }
    return Rank("srun", variables)


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
    node_port = _number(environment, port) if port in environment else _DEFAULT_PORT
    return Node(who, _number(environment, rank), num_nodes, environment[addr], node_port)


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise UserError(f"environment variable {name}: expected a number, got {value!r}")
    return int(value)
