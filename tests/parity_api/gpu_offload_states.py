"""`offload_states` on CUDA devices: `torchrun --nproc-per-node N -m parity_api.gpu_offload_states FOLDER`.

Every rank writes what it found to FOLDER/rankN.json.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, INNER, ROWS = 512, 4096, 8
WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "half on the host": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
}


def make(way: dict[str, Any]) -> Any:
    import heavylift

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **way},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    return heavylift.initialize(model=model, config=config)[0]


def step(engine: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank())
    rows = torch.randn(ROWS, WIDTH, generator=generator).to(engine.device, torch.bfloat16)
    engine.backward(engine(rows).float().square().mean())
    engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    from heavylift.offload.groups import local_tensor

    engine.settle()
    return [local_tensor(p).detach().clone() for p in engine.module.parameters()]


def held_bytes() -> int:
    """On the device, by all tensors."""
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def there_and_back(way: dict[str, Any]) -> dict[str, Any]:
    """Two engines take the same steps; the states of one are away in between, page-locked or not."""
    moved, stays = make(way), make(way)
    freed, told = [], []
    for round_trip in range(4):
        step(moved, round_trip)
        step(stays, round_trip)
        moved.settle()
        stays.settle()
        before, usage = held_bytes(), moved.optimizer.usage.device_bytes
        moved.offload_states(pin_memory=round_trip % 2 == 0, non_blocking=round_trip > 1)
        freed.append(before - held_bytes())
        told.append(usage - moved.optimizer.usage.device_bytes)
        moved.reload_states(non_blocking=round_trip > 1)
        back = held_bytes()
        assert back == before, (back, before)
    same = all(torch.equal(a, b) for a, b in zip(weights(moved), weights(stays), strict=True))
    numel = sum(p.numel() for p in weights(stays))
    moved.destroy()
    stays.destroy()
    return {"same": same, "freed": freed, "told": told, "numel": numel}


def main() -> None:
    """All ways, one after the other."""
    import heavylift

    heavylift.init_distributed()
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {name: there_and_back(way) for name, way in WAYS.items()}
    (Path(sys.argv[1]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
