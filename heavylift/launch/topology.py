"""What the kernel says of the machine: physical cores, their hardware threads, memory nodes, and where a GPU hangs.

All of it is read below `root` (default `/`), from sysfs. A machine that says nothing counts as one memory node whose
CPUs are cores of their own. Left out: caches, distances between nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_CPU_FOLDER = "sys/devices/system/cpu"
_NODE_FOLDER = "sys/devices/system/node"


@dataclass(frozen=True)
class Core:
    """One physical core."""

    node: int
    """Its memory node."""
    cpus: tuple[int, ...]
    """CPU numbers of its hardware threads that may be used, ascending."""


@dataclass(frozen=True)
class Topology:
    """The usable part of a machine."""

    cores: tuple[Core, ...]
    """Node after node, within a node by lowest CPU number."""
    memory_nodes: tuple[int, ...]
    """Nodes that have memory of their own; empty where the kernel does not say."""

    @property
    def num_cpus(self) -> int:
        """Usable hardware threads."""
        return sum(len(core.cpus) for core in self.cores)


_MAX_DIGITS = 5


def parse_cpu_list(text: str) -> list[int]:
    """CPU numbers of the kernel's list form: `0-3,8` is [0, 1, 2, 3, 8]. Raises ValueError for anything else."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if not part.strip():
            continue
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither a number nor a range such as 0-3")
        if max(len(first), len(last)) > _MAX_DIGITS:  # its range would fill the memory
            raise ValueError(f"{part.strip()[:20]!r}: no machine has a core of this number")
        if dash and int(last) < int(first):
            raise ValueError(f"range {part.strip()!r} runs backwards")
        cpus += range(int(first), int(last if dash else first) + 1)
    return cpus


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The kernel's list form of CPU numbers: [0, 1, 2, 3, 8] is `0-3,8`."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def read_topology(allowed: Collection[int], root: Path = Path("/")) -> Topology:
    """Cores and nodes of the CPUs in `allowed` (an affinity mask) that are online."""
    cpus_of_node = {node: set(cpus) for node, cpus in _nodes(root).items()}
    node_of = {cpu: node for node, cpus in cpus_of_node.items() for cpu in cpus}
    online = _cpu_list(root / _CPU_FOLDER / "online")
    usable = sorted(set(allowed) if online is None else set(allowed) & set(online))
    threads: dict[tuple[int, int], list[int]] = {}
    for cpu in usable:
        # a core is known by its lowest thread: core ids repeat from die to die
        first = min(_siblings(cpu, root), default=cpu)
        threads.setdefault((node_of.get(cpu, 0), first), []).append(cpu)
    cores = tuple(Core(node, tuple(cpus)) for (node, _), cpus in sorted(threads.items()))
    with_memory = _cpu_list(root / _NODE_FOLDER / "has_memory")
    return Topology(cores, tuple(with_memory or ()))


def gpu_node(pci_id: str, root: Path = Path("/")) -> int | None:
    """The memory node that a GPU hangs on, None where the kernel does not know (virtual machines, one node).

    `pci_id`: domain:bus:device.function in hex, as `0000:3b:00.0`; upper case and a domain of 8 digits do too.
    """
    domain, _, rest = pci_id.lower().partition(":")
    folder = root / "sys/bus/pci/devices" / f"{domain[-4:].zfill(4)}:{rest}"
    try:
        node = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1
    if node >= 0:
        return node
    # firmware without proximity data: the CPUs beside the device may still lie on one of several nodes
    nodes = _nodes(root)
    near = set(_cpu_list(folder / "local_cpulist") or ())
    homes = [number for number, cpus in nodes.items() if near & set(cpus)]
    return homes[0] if len(homes) == 1 and len(nodes) > 1 else None


def _nodes(root: Path) -> dict[int, list[int]]:
    """CPU numbers of every memory node, offline ones possibly included."""
    found = {}
    for folder in (root / _NODE_FOLDER).glob("node[0-9]*"):
        cpus = _cpu_list(folder / "cpulist")
        if cpus is not None:
            found[int(folder.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def _siblings(cpu: int, root: Path) -> list[int]:
    folder = root / _CPU_FOLDER / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # new and old name of the same thing
        if cpus := _cpu_list(folder / name):
            return cpus
    return []


def _cpu_list(file: Path) -> list[int] | None:
    try:
        return parse_cpu_list(file.read_text())
    except (OSError, ValueError):
        return None
