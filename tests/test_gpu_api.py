"""initialize() on CUDA devices, NCCL beside gloo: losses, norms and weights of the plain loop on the CPU.

Run with `pytest -m gpu`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity_api.gpu import cases
from parity_api.plain import plain_curve
from ranks.gpus import run_on_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# other kernels than the CPU's, in the precision of forward and backward
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3}


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_the_matrix_on_gpus(num_gpus: int, tmp_path: Path) -> None:
    result = tmp_path / "curves.pt"
    run_on_gpus(num_gpus, "parity_api.gpu", result)
    for case, (losses, norms, _) in zip(cases(), torch.load(result), strict=True):
        plain = plain_curve(case.model, case.precision, num_gpus, case.accumulation)
        assert losses == pytest.approx(plain.losses, rel=TOLERANCE[case.precision]), case
        assert norms == pytest.approx(plain.norms, rel=4 * TOLERANCE[case.precision]), case
