"""Checkpoints of engines on CUDA devices: `torchrun --nproc-per-node N -m parity_api.gpu_checkpoint FOLDER`.

Every rank writes what it found to FOLDER/rankN.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parity_api.models import MAKERS
from parity_api.runs import Case, ds_config, train

FORMATS = ("fp32", "split", "int8")


def states(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's shard of every state and of every weight, on the CPU."""
    from heavylift.api.checkpoint_states import saved_states
    from heavylift.api.checkpoint_writer import made
    from heavylift.offload.groups import local_tensor

    engine.settle()
    params = dict(engine.module.named_parameters())
    trained = {name: param for name, param in params.items() if param.requires_grad}
    tensors = {key: made(tensor) for key, tensor in saved_states(engine.optimizer, trained).items()} | params
    return {key: local_tensor(tensor).detach().cpu().clone() for key, tensor in tensors.items()}


def resumed(state_format: str, folder: Path) -> dict[str, bool]:
    """Whether an engine that loads has the states of the one that saved, with parts of them on both tiers."""
    import heavylift

    case = Case("branches", 3, "cpu", "bf16", 1)
    config = ds_config(case, dist.get_world_size(), heavylift={"state_format": state_format})
    first, second = (heavylift.initialize(model=MAKERS[case.model](), config=config)[0] for _ in range(2))
    train(first, case.model, case.precision, 1, slice(0, 3))
    train(second, case.model, case.precision, 1, slice(0, 1))
    before = states(first)
    first.save_checkpoint(folder / state_format, tag="last")
    first.save_checkpoint(folder / state_format, tag="last")  # over the first
    differed = any(not torch.equal(before[key], value) for key, value in states(second).items())
    second.load_checkpoint(folder / state_format)
    same = all(torch.equal(before[key], value) for key, value in states(second).items())
    first.destroy()
    second.destroy()
    return {"differed": differed, "same": same}


def main() -> None:
    """All formats, one after the other."""
    import heavylift

    heavylift.init_distributed()
    folder = Path(sys.argv[1])
    found = {state_format: resumed(state_format, folder) for state_format in FORMATS}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
