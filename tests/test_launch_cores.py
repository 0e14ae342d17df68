"""Who gets which cores: machines of many shapes as fake sysfs trees, and real processes that are really bound."""

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
from heavylift.launch import binding, devices, numa
from heavylift.launch.placement import RankPlace, dump_places, parse_places, place_ranks
from heavylift.launch.topology import format_cpu_list, gpu_node, parse_cpu_list, read_topology


def machine(
    root: Path,
    nodes: Sequence[str],
    threads: int = 1,
    adjacent: bool = False,
    offline: Sequence[int] = (),
    gpus: Sequence[int] = (),
) -> list[str]:
    """A sysfs tree of a machine: the CPU list of each node, hardware threads per core numbered side by side or far
    apart, and the node of each GPU. Returns the GPUs' PCI ids."""
    lists = [parse_cpu_list(text) for text in nodes]
    cpus = sorted(cpu for one in lists for cpu in one)
    num_cores = len(cpus) // threads
    for cpu in cpus:
        if adjacent:
            siblings = [cpu // threads * threads + thread for thread in range(threads)]
        else:
            siblings = [cpu % num_cores + thread * num_cores for thread in range(threads)]
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        if cpu not in offline:
            online = [one for one in siblings if one not in offline]
            (folder / "thread_siblings_list").write_text(format_cpu_list(online) + "\n")
    online = [cpu for cpu in cpus if cpu not in offline]
    (root / "sys/devices/system/cpu/online").write_text(format_cpu_list(online) + "\n")
    for number, one in enumerate(lists):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(format_cpu_list(one) + "\n")
    (root / "sys/devices/system/node/has_memory").write_text(f"0-{len(nodes) - 1}\n")
    ids = []
    for index, node in enumerate(gpus):
        ids.append(f"0000:{16 + index:02x}:00.0")
        folder = root / "sys/bus/pci/devices" / ids[-1]
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        near = lists[node] if node >= 0 else cpus
        (folder / "local_cpulist").write_text(format_cpu_list(near) + "\n")
    return ids


def places(
    root: Path, ids: Sequence[str], num_ranks: int, allowed: Sequence[int], usable: int = 10**6
) -> list[RankPlace]:
    nodes = [gpu_node(ids[rank], root) if rank < len(ids) else None for rank in range(num_ranks)]
    return place_ranks(read_topology(allowed, root), nodes, usable)


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8\n") == [0, 1, 2, 3, 8] and parse_cpu_list("\n") == []
    assert format_cpu_list([8, 0, 2, 1, 3]) == "0-3,8"
    for wrong in ("a", "1-", "-1", "3-1", "0-3:2", "1;2"):
        with pytest.raises(ValueError):
            parse_cpu_list(wrong)


def test_one_socket_without_hyperthreads(tmp_path: Path) -> None:
    ids = machine(tmp_path, ["0-7"], gpus=[0, 0])
    assert places(tmp_path, ids, 2, range(8)) == [RankPlace((0, 1, 2, 3), 4, 0), RankPlace((4, 5, 6, 7), 4, 0)]


@pytest.mark.parametrize("adjacent", [False, True])
def test_two_sockets_with_hyperthreads(tmp_path: Path, adjacent: bool) -> None:
    # 2 sockets of 4 cores of 2 threads; the GPUs hang the wrong way round, and index order would cross the sockets
    nodes = ["0-7", "8-15"] if adjacent else ["0-3,8-11", "4-7,12-15"]
    ids = machine(tmp_path, nodes, threads=2, adjacent=adjacent, gpus=[1, 0, 1, 0])
    expected = [(8, 10, 9, 11), (0, 2, 1, 3), (12, 14, 13, 15), (4, 6, 5, 7)]
    if not adjacent:
        expected = [(4, 5, 12, 13), (0, 1, 8, 9), (6, 7, 14, 15), (2, 3, 10, 11)]
    found = places(tmp_path, ids, 4, range(16))
    assert [place.cpus for place in found] == expected  # a thread of each core first, then the siblings
    assert [place.node for place in found] == [1, 0, 1, 0]
    assert [place.num_threads for place in found] == [2] * 4


def test_four_nodes_with_eight_gpus(tmp_path: Path) -> None:
    nodes = [f"{16 * node}-{16 * node + 15}" for node in range(4)]
    ids = machine(tmp_path, nodes, gpus=[3, 3, 1, 1, 0, 0, 2, 2])
    found = places(tmp_path, ids, 8, range(64))
    assert [place.node for place in found] == [3, 3, 1, 1, 0, 0, 2, 2]
    assert [format_cpu_list(place.cpus) for place in found[:3]] == ["48-55", "56-63", "16-23"]
    assert sorted(cpu for place in found for cpu in place.cpus) == list(range(64))
    # half of the GPUs: the nodes' other cores are not left idle by a second rank that is not there
    assert [format_cpu_list(place.cpus) for place in places(tmp_path, ids[::2], 4, range(64))] == [
        "48-63",
        "16-31",
        "0-15",
        "32-47",
    ]


def test_gpu_of_unknown_node_goes_where_there_is_room(tmp_path: Path) -> None:
    ids = machine(tmp_path, ["0-3", "4-7"], gpus=[0, -1, 0])
    found = places(tmp_path, ids, 3, range(8))
    assert [place.cpus for place in found] == [(0, 1), (4, 5, 6, 7), (2, 3)]


def test_all_gpus_of_unknown_node_share_by_index(tmp_path: Path) -> None:
    ids = machine(tmp_path, ["0-3", "4-7"], gpus=[-1, -1])
    assert [place.cpus for place in places(tmp_path, ids, 2, range(8))] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    three = places(tmp_path, [], 3, range(8))
    assert [place.cpus for place in three] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [place.node for place in three] == [0, None, 1]  # the middle one crosses nodes: no memory policy for it


def test_firmware_without_a_node_but_with_near_cpus(tmp_path: Path) -> None:
    ids = machine(tmp_path, ["0-3", "4-7"], gpus=[-1])
    (tmp_path / "sys/bus/pci/devices" / ids[0] / "local_cpulist").write_text("4-7\n")
    assert gpu_node(ids[0], tmp_path) == 1
    assert gpu_node("00000000" + ids[0][4:].upper(), tmp_path) == 1  # as NVML spells it
    assert gpu_node("0000:ff:00.0", tmp_path) is None


def test_cpuset_smaller_than_the_node(tmp_path: Path) -> None:
    ids = machine(tmp_path, ["0-7", "8-15"], gpus=[0, 1])
    assert [place.cpus for place in places(tmp_path, ids, 2, [2, 3, 9])] == [(2, 3), (9,)]
    # the cpuset leaves out a GPU's node altogether
    assert [place.cpus for place in places(tmp_path, ids, 2, [0, 1, 2, 3])] == [(0, 1), (2, 3)]


def test_offline_cpus_are_not_used(tmp_path: Path) -> None:
    ids = machine(tmp_path, ["0-3,8-11", "4-7,12-15"], threads=2, offline=[1, 9, 12], gpus=[0, 1])
    found = places(tmp_path, ids, 2, range(16))
    assert [place.cpus for place in found] == [(0, 2, 3, 8, 10, 11), (4, 5, 6, 7, 13, 14, 15)]
    assert [place.num_threads for place in found] == [3, 4]


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    ids = machine(tmp_path, ["0-1"], gpus=[0] * 5)
    assert [place.cpus for place in places(tmp_path, ids, 5, range(2))] == [(0,), (1,), (0,), (1,), (0,)]


def test_a_quota_limits_threads_and_cores(tmp_path: Path) -> None:
    ids = machine(tmp_path, ["0-7,16-23", "8-15,24-31"], threads=2, gpus=[0, 1])
    found = places(tmp_path, ids, 2, range(32), usable=6)
    assert found == [RankPlace((0, 1, 2), 3, 0), RankPlace((8, 9, 10), 3, 1)]
    assert [place.num_threads for place in places(tmp_path, ids, 2, range(32), usable=31)] == [8, 8]


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert places(tmp_path, [], 2, [3, 5]) == [RankPlace((3,), 1, 0), RankPlace((5,), 1, 0)]


def test_the_table_survives_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [RankPlace((0, 2, 1), 2, None), RankPlace((7,), 1, 1)]
    assert parse_places(dump_places(table)) == table
    monkeypatch.setenv("HEAVYLIFT_PLACES", dump_places(table))
    assert binding.place_of_rank(1, 2) == table[1]
    assert binding.place_of_rank(1, 3).cpus != (7,)  # a table of another launch does not count


def test_core_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = machine(tmp_path, ["0-7", "8-15"], gpus=[0, 1])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(14)))
    found = binding.machine_places(2, core_list="4-5,10-13", pci_ids=ids, root=tmp_path)
    assert [place.cpus for place in found] == [(4, 5), (10, 11, 12, 13)]
    # GPUs 1 and 0 in this order
    swapped = binding.machine_places(2, slots=[1, 0], pci_ids=ids, root=tmp_path)
    assert [place.node for place in swapped] == [1, 0]
    for wrong, said in [
        ("0-", "'0-' is neither a number nor a range"),
        ("0-99999999999", "'0-99999999999': no machine has a core of this number"),
        ("", "it names no core"),
        ("0-3,2", "core 2 is named twice"),
        ("12-15", "core 14-15 may not be used here; usable: 0-13"),
    ]:
        with pytest.raises(UserError, match=f"^--bind_core_list {wrong!r}: .*{said}"):
            binding.machine_places(2, core_list=wrong, pci_ids=ids, root=tmp_path)


def test_visible_devices_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab12, 7")
    assert devices.device_list([0, 2], 3) == "4,7" and devices.device_list([1], 3) == "GPU-ab12"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices.device_list([1, 3], 4) == "1,3"


def test_memory_policy_of_this_process() -> None:
    """The kernel's own answer, in a process of its own; where it forbids policies the reason is told."""
    code = "from heavylift.launch.numa import prefer_node\nfrom memory_policy import preferred_node\n"
    code += "print(prefer_node(0), preferred_node())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=command_env(), cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "None 0\n" or "set_mempolicy" in done.stdout or "no memory policies" in done.stdout


def test_memory_policy_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "vax")
    assert numa.prefer_node(0) == f"no memory policies on {sys.platform} vax"


BOUND = """
import json, os, threading
from heavylift.launch.cores import num_usable_cores, split_cores, threads_per_rank
seen = []
thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
thread.start(); thread.join()
rank = int(os.environ["LOCAL_RANK"])
threads = os.environ["OMP_NUM_THREADS"]
compilers = os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
print(json.dumps([rank, seen[0], split_cores(rank, 2), threads, compilers, threads_per_rank(2), num_usable_cores()]))
"""


def test_a_rank_is_bound_and_still_knows_the_machine() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    table = [RankPlace((allowed[0],), 1, 0), RankPlace((allowed[-1],), 1, 0)]
    env = command_env(**binding.binding_environment(table, bind=True), LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    del env["OMP_NUM_THREADS"]
    env.pop("TORCHINDUCTOR_COMPILE_THREADS", None)
    code = f"from heavylift.launch.entry import bind_if_told; bind_if_told()\n{BOUND}"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = allowed[-1]
    assert json.loads(done.stdout) == [1, [last], [last], "1", "1", 1, len({allowed[0], last})]


TRAINER = """
import os, sys
with open(f"{sys.argv[1]}/rank{os.environ['LOCAL_RANK']}", "w") as file:
    file.write(f"{sorted(os.sched_getaffinity(0))} {os.environ['HEAVYLIFT_BIND']}")
"""


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_training_binds_its_workers_where_there_are_gpus(tmp_path: Path, num_gpus: int) -> None:
    """Two GPUs that sysfs does not know: the cores are divided in order, and each worker is bound to its part."""
    (tmp_path / "a_trainer.py").write_text(TRAINER, encoding="utf-8")
    code = (
        "import sys; from heavylift.launch import runner\n"
        f"runner.gpu_pci_ids = lambda: ['ffff:00:00.0'] * {num_gpus}\n"
        "sys.exit(runner.launch_workers(2, sys.argv[1:], 'a_trainer'))"
    )
    env = command_env()
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    everything = sorted(os.sched_getaffinity(0))
    bound = [sorted(place.cpus) for place in binding.machine_places(2, pci_ids=[])]
    assert found == [f"{cpus} {int(num_gpus > 0)}" for cpus in (bound if num_gpus else [everything] * 2)]


BINDS_ITSELF = """
import os
from heavylift.launch.binding import bind_unless_bound
from heavylift.launch.cores import split_cores
allowed = os.sched_getaffinity(0)
before = split_cores(1, 2)
troubles = bind_unless_bound(1, 2)
print(sorted(os.sched_getaffinity(0)) == sorted(before), split_cores(1, 2) == before, troubles)
os.sched_setaffinity(0, allowed)
print(bind_unless_bound(0, 2), os.sched_getaffinity(0) == allowed)
"""


def test_a_script_binds_itself_once_and_divides_the_same_cores_after() -> None:
    ended = subprocess.run([sys.executable, "-c", BINDS_ITSELF], env=command_env(), capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["True True []", "[] True"], ended.stderr
