"""What two ranks wait for each other's collectives where one of them is late: `python -m ranks.gpu_collectives`.

torchrun --nproc-per-node 2 -m ranks.gpu_collectives CONFIG_FOLDER RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heavylift.collective_waits import CollectiveWaits
from ranks.gpu_schedules import VOCAB, build, join
from ranks.plain import make_steps
from ranks.sharded import Setup, take_step

CYCLES = 400_000_000
"""Some 0.2 s of a GPU that does nothing."""
LATE = ("", "forward", "backward")


def sleep_s() -> float:
    """How long `CYCLES` take here."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(CYCLES)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def waits(folder: Path, device: torch.device, schedule: str) -> list[dict[str, Any]]:
    """Of steps in which rank 1's second layer is late in nothing, in forward, in backward."""
    engine = build(folder, Setup(dtype=torch.bfloat16, schedule=schedule, clip=1e6), device)
    collectives = CollectiveWaits(engine.sharded, device)
    rows = make_steps(1, VOCAB, max_length=96)[0]
    layer = engine.module.get_submodule("model.layers.1")
    now = ""

    def late(phase: str) -> None:
        if phase == now and dist.get_rank() == 1:
            torch.cuda._sleep(CYCLES)

    layer.register_forward_hook(lambda *_: late("forward"))
    layer.register_full_backward_hook(lambda *_: late("backward"))
    found = []
    for step, phase in enumerate([*LATE, *LATE]):
        now = phase
        take_step(engine, rows)
        torch.cuda.synchronize()
        seconds = collectives.take_s()
        if step >= len(LATE):  # the first ones set up NCCL
            found.append({"schedule": schedule, "late": phase, "waited_s": seconds})
    engine.optimizer.close()
    return found


def main() -> None:
    """One rank under torchrun: rank 0 writes the results of all."""
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    device = join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    mine = {
        "sleep_s": sleep_s(),
        "steps": [row for name in ("synchronous", "deferred") for row in waits(folder, device, name)],
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=dist.new_group(backend="gloo"))
    if dist.get_rank() == 0:
        result.write_text(json.dumps(gathered))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
