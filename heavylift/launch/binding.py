"""Each rank on the cores beside its GPU: read the machine, divide it, bind a process.

The launcher divides once for all ranks of the machine and hands the table on in `HEAVYLIFT_PLACES`; a rank started by
anything else (torchrun, srun) divides for itself and arrives at the same table. `HEAVYLIFT_BIND=1` tells
`heavylift.launch.entry` to bind the process before its first thread. The CPU step's threads go through here in any
case (`heavylift.launch.cores.split_cores`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from heavylift.errors import UserError
from heavylift.launch.devices import gpu_pci_ids
from heavylift.launch.numa import prefer_node
from heavylift.launch.placement import RankPlace, dump_places, limit_cores, parse_places, place_ranks
from heavylift.launch.quota import BIND_VARIABLE, PLACES_VARIABLE, allowed_cpus, num_usable_cores
from heavylift.launch.topology import gpu_node, read_topology


def machine_places(
    num_ranks: int,
    slots: Sequence[int] | None = None,
    core_list: str | None = None,
    pci_ids: Sequence[str] | None = None,
    root: Path = Path("/"),
) -> list[RankPlace]:
    """Places of the `num_ranks` ranks of this machine, of which rank r uses GPU `slots[r]` (default: GPU r).

    core_list: only these CPUs (`0-15,32`). pci_ids: of the visible GPUs, default: the driver is asked. Raises
    UserError for a bad `core_list`.
    """
    allowed = allowed_cpus()
    if core_list is not None:
        try:
            allowed = limit_cores(allowed, core_list)
        except ValueError as error:
            raise UserError(f"--bind_core_list {core_list!r}: {error}") from None
    topology = read_topology(allowed, root)
    if not topology.cores:  # sysfs of another machine, or none: what the kernel lets us use counts
        topology = read_topology(allowed, root / "nowhere")
    gpus = gpu_pci_ids() if pci_ids is None else pci_ids
    slots = range(num_ranks) if slots is None else slots
    nodes = [gpu_node(gpus[slot], root) if slot < len(gpus) else None for slot in slots]
    return place_ranks(topology, nodes, min(num_usable_cores(), topology.num_cpus))


def place_of_rank(local_rank: int, local_world_size: int) -> RankPlace:
    """This rank's part of its machine: as the launcher divided it, else divided here."""
    assert 0 <= local_rank < local_world_size, (local_rank, local_world_size)
    if (table := os.environ.get(PLACES_VARIABLE)) is not None:
        places = parse_places(table)
        if len(places) == local_world_size:
            return places[local_rank]
    return machine_places(local_world_size)[local_rank]


def bind_unless_bound(local_rank: int, local_world_size: int) -> list[str]:
    """Binds this process to its cores and makes memory come from their node, unless the launcher has done so.

    For a script that turns out to offload: threads that it starts from here on inherit the cores. Returns what could
    not be done, one line each.
    """
    if os.environ.get(BIND_VARIABLE) == "1":
        return []
    places = [place_of_rank(rank, local_world_size) for rank in range(local_world_size)]
    num_nodes = num_memory_nodes()
    # once bound, this process no longer sees the cores of the others: whoever divides them later needs the table
    os.environ.update(binding_environment(places, bind=True))
    return bind_process(places[local_rank], num_nodes)


def bind_process(place: RankPlace, num_nodes: int) -> list[str]:
    """Binds this process to a given place, on a machine with `num_nodes` memory nodes."""
    troubles = []
    try:
        os.sched_setaffinity(0, place.cpus)
    except OSError as error:
        troubles.append(f"cores {place.cpus} cannot be bound: {error.strerror}")
    if place.node is not None and num_nodes > 1 and (reason := prefer_node(place.node)) is not None:
        troubles.append(f"memory is not kept on node {place.node}: {reason}")
    return troubles


def num_memory_nodes(root: Path = Path("/")) -> int:
    """Memory nodes of the machine, at least 1."""
    return max(1, len(read_topology(allowed_cpus(), root).memory_nodes))


def binding_environment(places: Sequence[RankPlace], bind: bool) -> dict[str, str]:
    """Environment variables that tell workers of their places, and whether to bind to them."""
    return {PLACES_VARIABLE: dump_places(places), BIND_VARIABLE: "1" if bind else "0"}
