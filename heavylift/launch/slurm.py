"""SLURM: what a job says about itself, and the `srun` line that starts one launcher per node.

Lists of nodes (`gpu[01-03,7],login`) are read here, because `scontrol` is not on every compute node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from heavylift.errors import UserError

_PART = re.compile(r"([^,\[]+)(?:\[([^\]]*)\]([^,\[]*))?(?:,|$)")
_PORT_BASE, _PORT_RANGE = 20000, 10000


def expand_nodes(text: str) -> list[str]:
    """Names in a SLURM node list. Raises UserError for a list of another form."""
    names: list[str] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None:
            raise UserError(f"SLURM node list {text!r}: cannot be read; give --hostfile instead")
        position = match.end()
        prefix, ranges, suffix = match[1], match[2], match[3] or ""
        if ranges is None:
            names.append(prefix)
            continue
        for part in ranges.split(","):
            first, dash, last = part.partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise UserError(f"SLURM node list {text!r}: cannot be read; give --hostfile instead")
            for number in range(int(first), int(last if dash else first) + 1):
                names.append(f"{prefix}{number:0{len(first)}d}{suffix}")
    return names


def job_port(environment: Mapping[str, str]) -> int:
    """A port that jobs which share a node do not share: from the job's number."""
    job = environment.get("SLURM_JOB_ID", "0")
    return port_of(int(job) if job.isdecimal() else 0)


def port_of(job: int) -> int:
    """The port of a job by its number."""
    return _PORT_BASE + job % _PORT_RANGE


def job_nodes(environment: Mapping[str, str]) -> list[str]:
    """Nodes of this step or job. Raises UserError outside a job."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not listed:
        raise UserError(
            "--launcher slurm: not in a SLURM job (no SLURM_JOB_NODELIST); use sbatch or salloc, or --launcher ssh"
        )
    nodes = expand_nodes(listed)
    if not nodes:
        raise UserError(f"SLURM node list {listed!r}: names no node; give --hostfile instead")
    return nodes


def srun_command(nodes: Sequence[str], extra: Sequence[str], command: Sequence[str]) -> list[str]:
    """The `srun` line that runs `command` once on each of `nodes`; one that fails ends the others."""
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        "--kill-on-bad-exit=1",
        # else each node's launcher gets one core, and its ranks with it
        "--cpu-bind=none",
        *extra,
        *command,
    ]
