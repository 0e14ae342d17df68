"""Schedules on CUDA devices beside the synchronous step: one rank of `python -m ranks.gpu_schedules`, or in a process.

    torchrun --nproc-per-node 2 -m ranks.gpu_schedules CONFIG_FOLDER RESULT.json

Comparing bits needs the same bits of the same run: kernels are asked to be deterministic, and the synchronous run is
done twice to see that they are.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from heavylift.config.schema import ModelConfig, Schedule, StateFormat, Tier
from heavylift.engine import Engine, build_optimizer
from heavylift.models.load import build_on_meta, init_random_weights, load_hf_config, materialise
from heavylift.offload.groups import local_tensor
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model
from ranks.llamas import llama_config, save_llama_config
from ranks.memory import status_bytes
from ranks.plain import Rows, make_steps
from ranks.schedules import Disturbance, Outcome, compare, distances, observe, without_gates
from ranks.sharded import BETAS, Setup, param_groups, take_step

VOCAB = 2048
NUM_STEPS = 10
BAD_STEP = 7
LR = 1e-3
CHUNK = 100_003
"""Elements that are streamed together: several chunks a group, cut inside parameters."""
PIECE = 100_096
"""Elements that pass through a place of the staging ring: likewise."""
LIMIT, STRIKES = 1e6, 0.05
"""Above and below all gradient norms of these runs."""


def save_config(folder: Path) -> Path:
    """The config.json of a Llama of 3 million parameters: copies and steps take long enough to be overtaken."""
    return save_llama_config(folder, llama_config(VOCAB, 256, 768, 3, 4, 2, max_position_embeddings=128))


def join(rank: int, world_size: int, store: str) -> torch.device:
    """Deterministic kernels, this rank's device, and the process group."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=world_size)
    return device


def build(folder: Path, setup: Setup, device: torch.device, gated: bool = True) -> Engine:
    """The engine on this rank's device, with random weights that are the same every time. A collective."""
    config = ModelConfig(model_name_or_path=str(folder), init="random")
    model = build_on_meta(load_hf_config(folder, False), config, setup.dtype)
    sharded = shard_model(model, setup.stage, make_mesh(setup.stage, device.type))
    materialise(model, device)
    init_random_weights(model, 0.05, 1)
    options = TieredOptions(
        tier=Tier(setup.tier),
        ratio=setup.ratio,
        schedule=Schedule(setup.schedule),
        accumulate=setup.accumulation > 1,
        max_grad_norm=setup.clip,
        num_threads=2,
        state_format=StateFormat(setup.state_format),
        streamed_share=setup.streamed_share,
        gradients_on=Tier(setup.gradients_on),
    )
    small = (
        patch("heavylift.offload.streamed.CHUNK_NUMEL", CHUNK),
        patch("heavylift.offload.staging.PIECE_NUMEL", PIECE),
    )
    with nullcontext() if gated else without_gates(), small[0], small[1]:
        optimizer = build_optimizer(sharded, param_groups(model, setup), options, lr=LR, betas=BETAS, eps=1e-8)
    return Engine(sharded, optimizer, device)


def train(folder: Path, setup: Setup, device: torch.device, steps: Sequence[Rows], disturbance: Disturbance) -> Outcome:
    """The steps on this rank. A collective."""
    engine = build(folder, setup, device, disturbance.gated)
    return observe(engine, steps, setup.accumulation, disturbance)


def comparisons(folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """Every schedule beside the synchronous step, in several settings; on this rank."""
    steps = make_steps(NUM_STEPS, VOCAB, max_length=96)
    rows = []
    for stage, dtype, state_format, accumulation, clip, bad in (
        (3, torch.bfloat16, "fp32", 1, LIMIT, ""),
        (3, torch.bfloat16, "split", 1, STRIKES, ""),
        (3, torch.float32, "fp32", 1, LIMIT, "late"),
        (3, torch.bfloat16, "fp32", 2, STRIKES, "all"),
        (1, torch.bfloat16, "split", 1, 0.0, "all"),
    ):
        setup = Setup(
            stage=stage,
            dtype=dtype,
            accumulation=accumulation,
            clip=clip,
            lr=LR,
            two_groups=True,
            state_format=state_format,
        )
        bad_step = Disturbance(bad=bad, at=BAD_STEP if bad else -1)
        reference = train(folder, setup, device, steps, bad_step)
        here, there = "host", "device"
        places = [("synchronous", 1.0, 0.0, 0.0, here), ("synchronous", 0.8, 0.0, 0.5, here)]
        places += [("deferred", 1.0, 0.0, 1.0, here), ("deferred", 1.0, 0.0, 0.0, there)]
        schedules = ("deferred", "speculative", "auto", *(("immediate",) if clip == 0 else ()))
        kinds = ((1.0, 0.0, 0.0, here), (0.37, 0.002, 0.0, there), (0.8, 0.002, 0.5, here))
        places += [(name, *kind) for name in schedules for kind in kinds]
        for schedule, ratio, slow_s, share, waits_on in places:
            changed = replace(setup, schedule=schedule, ratio=ratio, streamed_share=share, gradients_on=waits_on)
            start_s = time.perf_counter()
            other = train(folder, changed, device, steps, replace(bad_step, host_step_s=slow_s))
            # `auto` has long been stepping in backward by the bad step, and never does while clipping strikes
            early = accumulation == 1 and schedule in ("speculative", "immediate", "auto")
            revised = (bad == "late" and early) or (clip == STRIKES and early and schedule != "auto")
            difference = compare(other, reference)
            rows.append(
                {
                    "setting": f"stage {stage} {dtype} {state_format} accumulation {accumulation} clip {clip} "
                    f"bad {bad or 'none'}",
                    "run": f"{schedule} ratio {ratio} slow {slow_s} streamed {share} gradients on {waits_on}",
                    "exact": not revised,
                    "tensors": list(difference.tensors),
                    "losses": difference.losses,
                    "skipped": difference.skipped,
                    "norm": difference.norm,
                    "distances": distances(other.tensors, reference.tensors),
                    "speculated": sum(other.speculated),
                    "operations": {str(name): count for name, count in other.operations.items()},
                    "seconds": round(time.perf_counter() - start_s, 2),
                }
            )
    return rows


def without_gates_comparisons(folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """What is different when nobody waits at the gates."""
    steps = make_steps(6, VOCAB, max_length=96)
    rows = []
    for schedule, share in (("deferred", 0.0), ("speculative", 0.0), ("deferred", 1.0)):
        setup = Setup(dtype=torch.bfloat16, clip=LIMIT, lr=LR)
        reference = train(folder, setup, device, steps, Disturbance())
        changed = replace(setup, schedule=schedule, streamed_share=share)
        found = compare(train(folder, changed, device, steps, Disturbance(0.02, gated=False)), reference)
        rows.append({"run": f"{schedule} streamed {share}", "tensors": list(found.tensors), "losses": found.losses})
    return rows


def long_runs(folder: Path, device: torch.device, num_steps: int = 200) -> list[dict[str, Any]]:
    """Device, host and page-locked bytes every 20 steps of a long run."""
    steps = make_steps(10, VOCAB, max_length=96)
    rows = []
    for schedule, accumulation, share, waits_on in (
        ("speculative", 1, 0.5, "device"),
        ("deferred", 1, 0.0, "host"),
        ("deferred", 2, 0.5, "host"),
    ):
        setup = Setup(
            dtype=torch.bfloat16,
            clip=LIMIT,
            lr=LR,
            schedule=schedule,
            accumulation=accumulation,
            ratio=0.7,
            streamed_share=share,
            gradients_on=waits_on,
        )
        # of the engines before: what goes in the middle of a run would hide as much that stays
        gc.collect()
        torch.cuda.empty_cache()
        engine = build(folder, setup, device)
        device_bytes, peak_bytes, host_bytes, locked_bytes = [], [], [], []
        for step in range(num_steps):
            take_step(engine, steps[step % len(steps)], accumulation)
            if step % 20 == 19:
                engine.optimizer.synchronize()
                torch.cuda.synchronize()
                device_bytes.append(torch.cuda.memory_allocated())
                peak_bytes.append(torch.cuda.max_memory_allocated())
                torch.cuda.reset_peak_memory_stats()
                host_bytes.append(status_bytes("RssAnon"))
                locked_bytes.append(engine.optimizer.usage.pinned_bytes)
        engine.optimizer.close()
        rows.append(
            {
                "run": f"{schedule} accumulation {accumulation} streamed {share}",
                "device": device_bytes,
                "peak": peak_bytes,
                "host": host_bytes,
                "pinned": locked_bytes,
            }
        )
        del engine
    return rows


def state_dict_bytes(folder: Path, device: torch.device) -> dict[str, int]:
    """What a state_dict takes on the device, and of the tensors in it those that lie on the host."""
    engine = build(folder, Setup(dtype=torch.bfloat16, schedule="deferred"), device)
    take_step(engine, make_steps(1, VOCAB, max_length=96)[0])
    engine.optimizer.synchronize()
    torch.cuda.synchronize()
    gc.collect()  # of engines before this one, which would go meanwhile
    before = torch.cuda.memory_allocated()
    state = engine.optimizer.state_dict()["state"]
    tensors = [local_tensor(t) for entry in state.values() for t in entry.values()]
    found = {
        "device": torch.cuda.memory_allocated() - before,
        "host": sum(t.nbytes for t in tensors if t.device.type == "cpu"),
    }
    engine.optimizer.close()
    return found


def all_results(folder: Path, device: torch.device) -> dict[str, Any]:
    """Everything above, on this rank, as JSON."""
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "comparisons": comparisons(folder, device),
        "without_gates": without_gates_comparisons(folder, device),
        "state_dict": state_dict_bytes(folder, device),
        "long_runs": long_runs(folder, device),
    }


def main() -> None:
    """One rank under torchrun: rank 0 writes the results of all."""
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    device = join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, all_results(folder, device), group=dist.new_group(backend="gloo"))
    if dist.get_rank() == 0:
        result.write_text(json.dumps(gathered))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
