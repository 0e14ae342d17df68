"""The fused GPU step against its specification, bit for bit, on the GPU and on the CPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from heavylift.offload.adamw import AdamWHyper, adamw_step_
from heavylift.offload.tensors import StepTensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HYPERS = {
    "plain": AdamWHyper(1e-3, 0.9, 0.999, 1e-8, 0.0, 1),
    "decay and clip": AdamWHyper(3e-4, 0.9, 0.95, 1e-8, 0.1, 7, grad_scale=0.37),
    "late": AdamWHyper(1e-5, 0.9, 0.999, 1e-8, 0.01, 100_000),
    "lr 0": AdamWHyper(0.0, 0.9, 0.999, 1e-8, 0.1, 3),
}


def _tensors(numel: int, grad_dtype: torch.dtype, out_dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    scale = torch.exp(4 * torch.randn(numel, generator=generator))
    master = torch.randn(numel, generator=generator)
    exp_avg = 1e-3 * scale * torch.randn(numel, generator=generator)
    exp_avg_sq = (1e-3 * scale * torch.randn(numel, generator=generator)).square()
    grad = (1e-2 * scale * torch.randn(numel, generator=generator)).to(grad_dtype)
    specials = torch.tensor([0.0, -0.0, 1e-40, -1e-44, 1e-20, 3e38])[:numel]
    grad[: len(specials)] = specials.to(grad_dtype)
    master[: len(specials)] = -specials
    return [master, exp_avg, exp_avg_sq, grad, torch.full((numel,), 7.0, dtype=out_dtype)]


@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS.keys())
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [1, 1000, 4097, 1_000_003])
def test_fused_step_equals_specification(
    numel: int, grad_dtype: torch.dtype, out_dtype: torch.dtype, hyper: AdamWHyper
) -> None:
    from heavylift.offload.fused_gpu import FusedGpuKernel

    on_cpu = _tensors(numel, grad_dtype, out_dtype)
    plain_gpu = [t.cuda() for t in on_cpu]
    fused_gpu = [t.cuda() for t in on_cpu]
    for _ in range(2):
        adamw_step_(StepTensors(*on_cpu), hyper)
        adamw_step_(StepTensors(*plain_gpu), hyper)
        FusedGpuKernel().step(StepTensors(*fused_gpu), hyper)
    names = ("master", "exp_avg", "exp_avg_sq", "grad", "param_out")
    for name, cpu, plain, fused in zip(names, on_cpu, plain_gpu, fused_gpu, strict=True):
        assert torch.equal(_bits(cpu), _bits(plain.cpu())), f"{name}: plain on the GPU differs from the CPU"
        assert torch.equal(_bits(cpu), _bits(fused.cpu())), f"{name}: fused differs"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, 1023, 16384, 1_000_003])
def test_sum_of_squares(numel: int, dtype: torch.dtype) -> None:
    from heavylift.offload.fused_gpu import FusedGpuKernel

    generator = torch.Generator().manual_seed(numel)
    x = (torch.exp(4 * torch.randn(numel, generator=generator)) * torch.randn(numel, generator=generator)).to(dtype)
    exact = x.double().square().sum()
    sums = [FusedGpuKernel().sum_squares(x.cuda()).cpu() for _ in range(3)]
    assert sums[0].dtype == torch.float64
    assert abs(sums[0] - exact) <= 1e-14 * exact
    assert sums[0] == sums[1] == sums[2]
    if numel:
        for bad in (float("nan"), float("inf")):
            x[numel // 2] = bad
            assert not torch.isfinite(FusedGpuKernel().sum_squares(x.cuda()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)
