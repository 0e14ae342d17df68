"""Which cores each rank of a machine gets: those beside its GPU, whole physical cores, shared out evenly.

Pure arithmetic over a `Topology`; `binding.py` reads the machine and applies the result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from heavylift.launch.topology import Core, Topology, format_cpu_list, parse_cpu_list


@dataclass(frozen=True)
class RankPlace:
    """What one rank gets of its machine."""

    cpus: tuple[int, ...]
    """One hardware thread of each core first, then the cores' other threads."""
    num_threads: int
    """Threads that keep these cores busy: one per physical core, fewer under a CPU quota."""
    node: int | None
    """The memory node that all these cores belong to, None if they lie on several."""


def place_ranks(topology: Topology, gpu_nodes: Sequence[int | None], num_usable: int) -> list[RankPlace]:
    """One place per rank; shares are disjoint as long as there is a core for every rank.

    gpu_nodes: for each rank the memory node of its GPU, None without a GPU or where that is not known. `num_usable`:
    CPUs' worth of time that all ranks may use together (control group). Ranks whose node is not known, or has no
    usable core, go to the nodes with the most cores per rank; when no rank's node is known, the cores are cut into
    equal runs, node after node.
    """
    assert gpu_nodes and topology.cores, (gpu_nodes, topology)
    num_ranks = len(gpu_nodes)
    cores_of: dict[int, list[Core]] = {}
    for core in topology.cores:
        cores_of.setdefault(core.node, []).append(core)
    known = [node if node in cores_of else None for node in gpu_nodes]
    if all(node is None for node in known):
        shares = [_share(topology.cores, rank, num_ranks) for rank in range(num_ranks)]
    else:
        shares = _shares_by_node(cores_of, known)
    limit = max(1, num_usable // num_ranks) if num_usable < topology.num_cpus else None
    return [_place(share, limit) for share in shares]


def dump_places(places: Sequence[RankPlace]) -> str:
    """One line of JSON, for an environment variable."""
    # `cpus` keeps its order, which a range would lose
    return json.dumps([[list(place.cpus), place.num_threads, place.node] for place in places], separators=(",", ":"))


def parse_places(text: str) -> list[RankPlace]:
    """The inverse of `dump_places`."""
    return [RankPlace(tuple(cpus), threads, node) for cpus, threads, node in json.loads(text)]


def limit_cores(allowed: Sequence[int], core_list: str) -> list[int]:
    """The CPUs of `core_list` (`0-15,32`), all of which must be in `allowed`. Raises ValueError with what is wrong."""
    asked = parse_cpu_list(core_list)
    if not asked:
        raise ValueError("it names no core")
    twice = sorted({cpu for cpu in asked if asked.count(cpu) > 1})
    if twice:
        raise ValueError(f"core {format_cpu_list(twice)} is named twice")
    missing = set(asked) - set(allowed)
    if missing:
        raise ValueError(f"core {format_cpu_list(missing)} may not be used here; usable: {format_cpu_list(allowed)}")
    return asked


def _shares_by_node(cores_of: dict[int, list[Core]], nodes: Sequence[int | None]) -> list[Sequence[Core]]:
    """Each rank's cores: those of its node, split among the ranks there."""
    ranks_on: dict[int, list[int]] = {node: [] for node in cores_of}
    for rank, node in enumerate(nodes):
        if node is not None:
            ranks_on[node].append(rank)
    for rank, node in enumerate(nodes):
        if node is None:
            roomiest = max(cores_of, key=lambda one: (len(cores_of[one]) / (len(ranks_on[one]) + 1), -one))
            ranks_on[roomiest].append(rank)
    shares: dict[int, Sequence[Core]] = {}
    for node, ranks in ranks_on.items():
        for position, rank in enumerate(sorted(ranks)):
            shares[rank] = _share(cores_of[node], position, len(ranks))
    return [shares[rank] for rank in range(len(nodes))]


def _share(cores: Sequence[Core], position: int, parts: int) -> Sequence[Core]:
    """The `position`th of `parts` runs of `cores`; with too few cores, ranks take turns."""
    if parts >= len(cores):
        return [cores[position % len(cores)]]
    return cores[position * len(cores) // parts : (position + 1) * len(cores) // parts]


def _place(cores: Sequence[Core], limit: int | None) -> RankPlace:
    depth = max(len(core.cpus) for core in cores)
    cpus = [core.cpus[thread] for thread in range(depth) for core in cores if thread < len(core.cpus)]
    nodes = {core.node for core in cores}
    threads = len(cores) if limit is None else min(len(cores), limit)
    return RankPlace(tuple(cpus[:limit]), threads, nodes.pop() if len(nodes) == 1 else None)
