"""Memory of the tiers: what the plan says is what is allocated, it stays so, and ranks share it.

Formulas: 12 bytes per element of float32 states (master, exp_avg, exp_avg_sq), 10 split, 8 with
bfloat16 moments, 4 more for an accumulator; a staging ring, here of two places as large as the largest group, for
parameters and (synchronous step) gradients, or the gradients of all groups (overlapped schedules).
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from ranks.llamas import llama_config, save_llama_config
from ranks.memory import measure, status_bytes
from ranks.plain import make_steps
from ranks.pool import run_on_fresh_ranks, run_on_ranks
from ranks.sharded import BETAS, Setup, param_groups, take_step

from heavylift.config.schema import ModelConfig, Schedule, StateFormat, Tier
from heavylift.engine import Engine, build_optimizer
from heavylift.memory.machine import host_available_bytes
from heavylift.memory.plan import MemoryPlan
from heavylift.memory.planner import ModelPlanner
from heavylift.models.load import build_on_meta, init_random_weights, load_hf_config, materialise
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model

CPU = torch.device("cpu")


def config_folder(root: Path, vocab: int, hidden: int, layers: int) -> Path:
    """A Llama's config.json alone."""
    return save_llama_config(root, llama_config(vocab, hidden, 2 * hidden, layers, 4, 2))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.9 million parameters: pages and cache lines are small beside them."""
    return config_folder(tmp_path_factory.mktemp("small"), vocab=2000, hidden=128, layers=3)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """34 million parameters: the process's own memory is small beside their states."""
    return config_folder(tmp_path_factory.mktemp("large"), vocab=4000, hidden=768, layers=5)


def usage_job(folder: Path, setup: Setup, num_steps: int = 0) -> dict[str, Any]:
    """Plan, allocation and growth of the process on this rank; and the resident bytes after every step."""
    config = ModelConfig(model_name_or_path=str(folder), init="random")
    model = build_on_meta(load_hf_config(folder, False), config, setup.dtype)
    sharded = shard_model(model, setup.stage, make_mesh(setup.stage, "cpu"))
    options = TieredOptions(
        tier=Tier(setup.tier),
        ratio=setup.ratio,
        schedule=Schedule(setup.schedule),
        accumulate=setup.accumulation > 1,
        state_format=StateFormat(setup.state_format),
        streamed_share=setup.streamed_share,
        gradients_on=Tier(setup.gradients_on),
    )
    plan = ModelPlanner(sharded, None, setup.dtype).plan(options, None)
    materialise(model, CPU)
    init_random_weights(model, 0.02, seed=1)
    grown = measure(
        lambda: build_optimizer(sharded, param_groups(model, setup), options, lr=1e-3, betas=BETAS, eps=1e-8)
    )
    optimizer = grown.result
    engine, resident = Engine(sharded, optimizer, CPU), []
    for rows in make_steps(num_steps, 2000):
        take_step(engine, rows, setup.accumulation)
        resident.append(status_bytes("VmRSS"))
    optimizer.close()
    return {
        "plan": plan,
        "usage": (optimizer.usage.device_bytes, optimizer.usage.host_bytes),
        "num_params": sum(p.numel() for p in model.parameters()),
        "largest": max(sum(p.numel() for _, p in group.params) for group in sharded.groups),
        "grown": grown.kept,
        "resident": resident,
    }


SETUPS = {
    "host": Setup(),
    "host_bfloat16": Setup(dtype=torch.bfloat16),
    "host_accumulation": Setup(accumulation=2),
    "host_bfloat16_accumulation": Setup(dtype=torch.bfloat16, accumulation=2),
    "part": Setup(ratio=0.37),
    "part_accumulation": Setup(ratio=0.37, accumulation=2),
    "device": Setup(tier="device"),
    "stage0": Setup(stage=0),
    "overlapped": Setup(schedule="deferred"),
    "split": Setup(dtype=torch.bfloat16, state_format="split"),
    "bf16_moments": Setup(state_format="bf16", ratio=0.6),
    "int8": Setup(state_format="int8"),
    "int8_accumulation_part": Setup(state_format="int8", dtype=torch.bfloat16, ratio=0.37, accumulation=2),
    "split_accumulation_part": Setup(dtype=torch.bfloat16, state_format="split", ratio=0.37, accumulation=2),
    "overlapped_bfloat16_part": Setup(schedule="auto", ratio=0.37, dtype=torch.bfloat16),
    "gradients_on_device": Setup(schedule="deferred", gradients_on="device", dtype=torch.bfloat16),
    "streamed": Setup(streamed_share=1.0, dtype=torch.bfloat16),
    "streamed_overlapped_half_split": Setup(
        streamed_share=0.5, schedule="auto", dtype=torch.bfloat16, state_format="split"
    ),
    "streamed_accumulation_part": Setup(streamed_share=0.5, ratio=0.37, accumulation=2),
    "overlapped_accumulation": Setup(schedule="auto", accumulation=2),
}


@pytest.mark.parametrize("name", SETUPS)
def test_allocation_is_the_plan_and_the_formula(name: str, small: Path) -> None:
    setup, world = SETUPS[name], 2
    share = 0.0 if setup.tier == "device" else setup.ratio
    state_bytes = {"fp32": 12, "split": 10, "bf16": 8, "int8": 6 + 8 / 256}[setup.state_format]
    state_bytes += 4 if setup.accumulation > 1 else 0
    param_bytes = setup.dtype.itemsize
    grad_bytes = 4 if setup.accumulation > 1 else param_bytes
    for rank in run_on_ranks(world, usage_job, small, setup):
        plan: MemoryPlan = rank["plan"]
        device, host = rank["usage"]
        assert host == plan.host_bytes
        assert device == plan.device_state_bytes + plan.slot_bytes
        device -= plan.slot_bytes
        shards = 1 if setup.stage == 0 else world
        elements = rank["num_params"] / shards
        largest = rank["largest"] / shards if share else 0
        keeps_all = setup.schedule != "synchronous" and setup.accumulation == 1
        # a place of the ring holds all of so small a part, so there are two
        passing = largest if setup.accumulation > 1 else 2 * largest
        gradients = elements * share if keeps_all and setup.gradients_on == "host" else passing
        # three slots for the states of the largest streamed group, which is far below a chunk
        assert plan.slot_bytes <= (3 * state_bytes * largest if setup.streamed_share else 0)
        if setup.streamed_share and setup.accumulation == 1:
            # gradients and parameters of streamed groups never come to the host
            gradients, largest = gradients * (1 - setup.streamed_share), largest * (setup.streamed_share < 1)
            gradients = gradients if keeps_all else 2 * largest
        staging = 2 * largest * param_bytes + gradients * grad_bytes
        assert device == pytest.approx(state_bytes * elements * (1 - share), rel=0.05)
        assert plan.host_state_bytes == pytest.approx(state_bytes * elements * share, rel=0.05)
        # the one group that is split may be the largest: then the places are smaller
        if share == 1 and setup.streamed_share in (0, 1):
            assert host == pytest.approx(state_bytes * elements + staging, rel=0.05)
        assert host <= 1.05 * (state_bytes * elements * share + staging)


def test_a_share_that_rounds_to_nothing(small: Path) -> None:
    setup = Setup(schedule="deferred", ratio=1e-9)
    for rank in run_on_ranks(2, usage_job, small, setup):
        assert rank["usage"][1] == rank["plan"].host_bytes


@pytest.mark.parametrize("name", ["host_accumulation", "part", "device", "overlapped"])
def test_the_process_grows_by_the_plan(name: str, large: Path) -> None:
    (rank,) = run_on_fresh_ranks(1, usage_job, large, SETUPS[name])
    planned = rank["plan"].host_bytes + rank["plan"].device_state_bytes
    assert rank["num_params"] > 30e6 and planned > 360e6
    # huge pages round every tensor's end up to 2 MiB, far within the 5%
    assert rank["grown"] == pytest.approx(planned, rel=0.05)


@pytest.mark.soak
def test_memory_is_flat_over_30_steps(small: Path) -> None:
    for rank in run_on_fresh_ranks(2, usage_job, small, Setup(ratio=0.6, schedule="deferred"), 30):
        early, late = median(rank["resident"][5:15]), median(rank["resident"][20:])
        # shards, states or gradients kept in every step would be 27 MB or more; the process breathes by 6 MB
        assert late - early < 12e6


def test_host_memory_does_not_depend_on_the_number_of_ranks(small: Path) -> None:
    totals = [sum(rank["usage"][1] for rank in run_on_ranks(world, usage_job, small, Setup())) for world in (1, 2, 4)]
    assert totals == pytest.approx([totals[0]] * 3, rel=0.05)
    assert totals[0] > 12 * 900_000


# ---- the machine --------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_control_group_of_version_2_is_believed(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/user/job\n")
    for folder, limit, used, cache in (("user", 900, 800, 50), ("user/job", 1000, 700, 300), ("", 5000, 0, 0)):
        base = tmp_path / "sys/fs/cgroup" / folder
        write(base / "memory.max", f"{limit}\n")
        write(base / "memory.current", f"{used}\n")
        write(base / "memory.stat", f"anon 3\ninactive_file {cache}\n")
    assert host_available_bytes(tmp_path) == 900 - 800 + 50
    write(tmp_path / "sys/fs/cgroup/user/memory.max", "max\n")
    assert host_available_bytes(tmp_path) == 1000 - 700 + 300


def test_control_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/box\n0::/\n")
    base = tmp_path / "sys/fs/cgroup/memory/box"
    write(base / "memory.limit_in_bytes", "2000\n")
    write(base / "memory.usage_in_bytes", "1500\n")
    write(base / "memory.stat", "inactive_file 7\ntotal_inactive_file 100\n")
    write(base.parent / "memory.limit_in_bytes", f"{2**63 - 4096}\n")  # no limit
    write(base.parent / "memory.usage_in_bytes", "1500\n")
    write(base.parent / "memory.stat", "total_inactive_file 0\n")
    assert host_available_bytes(tmp_path) == 600


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    import psutil

    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    write(tmp_path / "sys/fs/cgroup/job/memory.max", "max\n")
    for root in (tmp_path, tmp_path / "nothing"):
        assert host_available_bytes(root) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
