"""The launcher on real GPUs: the driver's numbering is torch's, filters choose devices, ranks sit beside their GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import command_env

from heavylift.launch.devices import gpu_pci_ids
from heavylift.launch.topology import gpu_node, read_topology

pytestmark = pytest.mark.gpu

TRAIN = """
import json, os
import torch
import torch.distributed as dist
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
total = torch.full((4,), rank + 1.0, device="cuda")
dist.all_reduce(total)
from heavylift.launch.cores import split_cores
from memory_policy import preferred_node
properties = torch.cuda.get_device_properties(local)
note = {
    "total": total.tolist(),
    "uuid": str(properties.uuid),
    "affinity": sorted(os.sched_getaffinity(0)),
    "cores": sorted(split_cores(local, int(os.environ["LOCAL_WORLD_SIZE"]))),
    "node": preferred_node(),
}
with open(f"rank{rank}.json", "w") as file:
    json.dump(note, file)
dist.destroy_process_group()
"""


def run(folder: Path, *args: str, **more: str) -> list[dict]:
    """What the ranks noted, in their order."""
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    argv = [sys.executable, "-m", "heavylift", "launch", *args, "train.py"]
    env = command_env(**more)
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env["PYTHONPATH"]])  # for memory_policy
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def uuids() -> list[str]:
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def test_the_driver_counts_as_torch_does() -> None:
    ids = gpu_pci_ids()
    assert len(ids) == torch.cuda.device_count()
    for index, one in enumerate(ids):
        properties = torch.cuda.get_device_properties(index)
        place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        assert one == "{:04x}:{:02x}:{:02x}.0".format(*place)


def test_every_gpu_has_a_rank_on_cores_of_its_node(tmp_path: Path) -> None:
    found = run(tmp_path, "--bind_cores_to_rank")
    count = torch.cuda.device_count()
    assert [note["uuid"] for note in found] == uuids()
    assert all(note["total"] == [count * (count + 1) / 2] * 4 for note in found)
    assert all(note["affinity"] == note["cores"] for note in found)
    owned = [cpu for note in found for cpu in note["affinity"]]
    assert len(set(owned)) == len(owned)
    topology = read_topology(os.sched_getaffinity(0))
    node_of = {cpu: core.node for core in topology.cores for cpu in core.cpus}
    for note, pci_id in zip(found, gpu_pci_ids(), strict=True):
        node = gpu_node(pci_id)
        if node is not None:
            assert {node_of[cpu] for cpu in note["affinity"]} == {node}
        if len(topology.memory_nodes) > 1 and node is not None:
            assert note["node"] == node


def test_filters_index_what_is_visible(tmp_path: Path) -> None:
    last = torch.cuda.device_count() - 1
    (note,) = run(tmp_path, "--include", f"localhost:{last}")
    assert note["uuid"] == uuids()[last] and note["total"] == [1.0] * 4
    if last > 0:
        backwards = ",".join(map(str, reversed(range(last + 1))))
        (note,) = run(tmp_path, "--include", f"localhost:{last}", CUDA_VISIBLE_DEVICES=backwards)
        assert note["uuid"] == uuids()[0]
