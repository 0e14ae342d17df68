"""Cases of the parity matrix on CUDA devices: `torchrun --nproc-per-node N -m parity_api.gpu RESULT.pt`."""

from __future__ import annotations

import sys
from itertools import product

import torch
import torch.distributed as dist

from parity_api.runs import Case, run_cases_job


def cases() -> list[Case]:
    """Stages 0 and 3, both tiers, all precisions, with and without accumulation."""
    points = product(("branches", "llama"), ((0, "none"), (2, "cpu"), (3, "cpu")), ("fp32", "bf16", "fp16"), (1, 4))
    return [Case(model, stage, device, *more) for model, (stage, device), *more in points]


def main() -> None:
    """Every rank runs all of them; rank 0 writes their curves, on the CPU."""
    import heavylift

    heavylift.init_distributed()
    curves = run_cases_job(cases())
    if dist.get_rank() == 0:
        torch.save([(c.losses, c.norms, {n: w.cpu() for n, w in c.weights.items()}) for c in curves], sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
