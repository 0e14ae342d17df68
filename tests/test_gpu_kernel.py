"""The fused GPU step against its specification, bit for bit, on the GPU and on the CPU. Run with `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from heavylift.config.schema import Schedule, StateFormat, Tier
from heavylift.offload.adamw import AdamWHyper, adamw_step_
from heavylift.offload.formats import low_halves, mark_signs_, rounds_up
from heavylift.offload.kernels import PlainKernel
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
    # finite in every dtype: the bits of a NaN are nobody's promise
    largest = 6e4 if grad_dtype == torch.float16 else 3e38
    specials = torch.tensor([0.0, -0.0, 1e-40, -1e-44, 1e-20, largest])[:numel]
    grad.clamp_(-largest, largest)
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
    x.clamp_(-6e4, 6e4)  # what float16 holds
    exact = x.double().square().sum()
    sums = [FusedGpuKernel().sum_squares(x.cuda()).cpu() for _ in range(3)]
    assert sums[0].dtype == torch.float64
    assert abs(sums[0] - exact) <= 1e-14 * exact
    assert sums[0] == sums[1] == sums[2]
    if numel:
        for bad in (float("nan"), float("inf")):
            x[numel // 2] = bad
            assert not torch.isfinite(FusedGpuKernel().sum_squares(x.cuda()))


SIZES = (1, 5, 0, 4096, 4097, 100_003, 64, 12_288)


def _rows(state_format: StateFormat, grad_dtype: torch.dtype, out_dtype: torch.dtype) -> list[StepTensors]:
    """Tensors on the GPU of many sizes, at aligned addresses and at others."""
    rows = []
    for numel in SIZES:
        for offset in (0, 1, 8, 16):
            whole = _states(numel + offset, state_format, first_step=False)
            grad, param = whole.grad.to(grad_dtype), whole.param_out
            assert param is not None
            whole = replace(whole, grad=grad, param_out=param.to(out_dtype))
            rows.append(_on_gpu(whole).part(slice(offset, None)))
    return rows


def _copies(rows: Sequence[StepTensors]) -> list[StepTensors]:
    """Elsewhere, and all aligned."""
    return [replace(row, **{name: tensor.clone() for name, tensor in row.named().items()}) for row in rows]


def _assert_all_same(rows: Sequence[StepTensors], others: Sequence[StepTensors]) -> None:
    for index, (row, other) in enumerate(zip(rows, others, strict=True)):
        _assert_same(row, other, f"row {index} of {row.master.numel()} elements")


@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS.keys())
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("state_format", [StateFormat.FP32, StateFormat.SPLIT])
def test_steps_of_a_table_equal_single_steps(
    state_format: StateFormat, grad_dtype: torch.dtype, hyper: AdamWHyper
) -> None:
    from heavylift.offload.fused_gpu import FusedGpuKernel

    for out_dtype in [torch.bfloat16] if state_format is StateFormat.SPLIT else [torch.bfloat16, torch.float32]:
        rows = _rows(state_format, grad_dtype, out_dtype)
        one_by_one, plain = _copies(rows), _copies(rows)
        for _ in range(2):
            FusedGpuKernel().prepare_all(rows)(hyper)
            for single, specified in zip(one_by_one, plain, strict=True):
                FusedGpuKernel().step(single, hyper)
                adamw_step_(specified, hyper)
        _assert_all_same(rows, one_by_one)
        _assert_all_same(rows, plain)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 8, 9, 1000])
def test_tables_of_any_length(num_rows: int) -> None:
    from heavylift.offload.fused_gpu import FusedGpuKernel

    generator = torch.Generator().manual_seed(num_rows)
    numels = torch.randint(0, 9000, (num_rows,), generator=generator).tolist()
    states = {numel: _states(numel, StateFormat.SPLIT, first_step=False) for numel in set(numels)}
    rows = [_on_gpu(states[numel]) for numel in numels]
    before = _copies(rows)
    one_by_one = _copies(rows)
    hyper = HYPERS["decay and clip"]
    FusedGpuKernel().prepare_all(rows)(hyper)
    for single in one_by_one:
        FusedGpuKernel().step(single, hyper)
    _assert_all_same(rows, one_by_one)
    assert all(
        not torch.equal(row.exp_avg, was.exp_avg) for row, was in zip(rows, before, strict=True) if len(was.grad)
    )


def test_a_table_of_different_formats_and_dtypes() -> None:
    from heavylift.offload.fused_gpu import FusedGpuKernel
    from heavylift.offload.noise import noise_of

    rows = _rows(StateFormat.SPLIT, torch.bfloat16, torch.bfloat16) + _rows(
        StateFormat.FP32, torch.float16, torch.float32
    )
    for index, row in enumerate(_rows(StateFormat.FP32, torch.float32, torch.bfloat16)):
        moments = {"exp_avg": row.exp_avg.bfloat16(), "exp_avg_sq": row.exp_avg_sq.bfloat16()}
        noise = noise_of(f"row {index}", 7, 0)
        rows.append(replace(row, state_format=StateFormat.BF16, noise=noise, **moments))
    one_by_one = _copies(rows)
    hyper = HYPERS["decay and clip"]
    FusedGpuKernel().prepare_all(rows)(hyper)
    for single in one_by_one:
        FusedGpuKernel().step(single, hyper)
    _assert_all_same(rows, one_by_one)


@pytest.mark.parametrize("state_format", [StateFormat.FP32, StateFormat.SPLIT])
def test_ten_steps_of_many_parameters_on_the_device(state_format: StateFormat) -> None:
    """Two parameter groups, one of them with a parameter that has a gradient every other time: three sets of
    hyperparameters; beside the step on the CPU."""
    from heavylift.offload.optimizer import TieredAdamW
    from heavylift.offload.options import TieredOptions

    generator = torch.Generator().manual_seed(1)
    shapes = [(100, 33), (7,), (64, 64), (1,), (4097,), (16, 1024)]
    start = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    runs = []
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(t.to(device).clone()) for t in start]
        options = TieredOptions(Tier.DEVICE, max_grad_norm=0.5, state_format=state_format)
        groups = [{"params": params[:3], "lr": 1e-2}, {"params": params[3:], "weight_decay": 0.1}]
        optimizer = TieredAdamW(groups, options=options)
        grads = torch.Generator().manual_seed(2)
        for step in range(10):
            for param in params:
                grad = torch.randn(param.shape, generator=grads).to(device, torch.bfloat16)
                param.grad = None if param is params[-1] and step % 2 else grad
            optimizer.step()
        state = optimizer.state_dict()["state"]
        runs.append([p.detach().cpu() for p in params] + [t.cpu() for e in state.values() for t in e.values()])
        optimizer.close()
    for on_cpu, on_gpu in zip(*runs, strict=True):
        assert torch.equal(on_cpu, on_gpu)


def _states(numel: int, state_format: StateFormat, first_step: bool) -> StepTensors:
    """Random states on the CPU; zero moments before a first step."""
    master, exp_avg, exp_avg_sq, grad, param = _tensors(numel, torch.bfloat16, torch.bfloat16)
    grad.clamp_(-1e3, 1e3)  # a square that overflows is never stepped early
    if first_step:
        exp_avg.zero_(), exp_avg_sq.zero_()
    param.copy_(master)
    if state_format is StateFormat.SPLIT:
        mark_signs_(exp_avg_sq, rounds_up(master, param))
        master = low_halves(master)
    return StepTensors(master, exp_avg, exp_avg_sq, grad, param, state_format)


def _on_gpu(tensors: StepTensors) -> StepTensors:
    moved = {name: tensor.cuda() for name, tensor in tensors.named().items()}
    return replace(tensors, **moved)


def _assert_same(on_gpu: StepTensors, expected: StepTensors, what: str) -> None:
    for name, tensor in expected.named().items():
        assert torch.equal(_bits(tensor.cpu()), _bits(on_gpu.named()[name].cpu())), f"{what}: {name} differs"


@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS.keys())
@pytest.mark.parametrize("state_format", [StateFormat.FP32, StateFormat.SPLIT])
@pytest.mark.parametrize("numel", [1, 4097, 1_000_003])
def test_fused_revisions_equal_their_specification(numel: int, state_format: StateFormat, hyper: AdamWHyper) -> None:
    from heavylift.offload.fused_gpu import FusedGpuKernel

    fused, plain = FusedGpuKernel(), PlainKernel()
    for coefficient in (0.9, 0.01, None):
        on_cpu = _states(numel, state_format, hyper.step == 1)
        on_gpu = _on_gpu(on_cpu)
        plain.step(on_cpu, hyper)
        fused.step(on_gpu, hyper)
        _assert_same(on_gpu, on_cpu, f"step {state_format}")
        if coefficient is None:
            plain.undo(on_cpu, hyper)
            fused.undo(on_gpu, hyper)
        else:
            plain.correct(on_cpu, hyper, coefficient)
            fused.correct(on_gpu, hyper, coefficient)
        _assert_same(on_gpu, on_cpu, f"revision {coefficient} {state_format}")


def _ten_steps(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Steps with the same gradients every time; the parameters and all states after them, on the CPU."""
    grads = torch.Generator().manual_seed(2)
    for _ in range(10):
        loss = sum((p * torch.randn(p.shape, generator=grads).to(p.device, torch.bfloat16)).sum() for p in params)
        loss.backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return [p.detach().cpu() for p in params] + [t.cpu() for e in state.values() for t in e.values()]


@pytest.mark.parametrize("state_format", [StateFormat.FP32, StateFormat.SPLIT])
def test_ten_steps_of_states_streamed_through_the_device(state_format: StateFormat) -> None:
    """As the optimizer does it: several chunks, two parameters, page-locked memory; beside the step on the CPU."""
    from heavylift.offload.optimizer import TieredAdamW
    from heavylift.offload.options import TieredOptions

    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator).bfloat16() for shape in ((1000, 333), (50_001,))]
    runs = []
    for device, share in (("cpu", 0.0), ("cuda", 1.0)):
        params = [torch.nn.Parameter(t.to(device).clone()) for t in start]
        options = TieredOptions(Tier.HOST, 0.9, Schedule.DEFERRED, max_grad_norm=0.5, streamed_share=share)
        options = replace(options, state_format=state_format)
        with patch("heavylift.offload.streamed.CHUNK_NUMEL", 60_007):
            optimizer = TieredAdamW(params, lr=1e-2, weight_decay=0.1, options=options)
        runs.append(_ten_steps(optimizer, params))
        assert (optimizer.usage.pinned_bytes > 9 * 0.9 * 383_001) == (device == "cuda")
        optimizer.close()
    for by_cpu, by_gpu in zip(*runs, strict=True):
        assert torch.equal(by_cpu, by_gpu)


@pytest.mark.parametrize("gradients_on", [Tier.HOST, Tier.DEVICE])
@pytest.mark.parametrize("state_format", list(StateFormat))
@pytest.mark.parametrize("schedule", [Schedule.SYNCHRONOUS, Schedule.DEFERRED])
def test_ten_steps_piece_by_piece(
    state_format: StateFormat, gradients_on: Tier, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the optimizer does it: several pieces, two groups, one cut between the tiers. By the compiled kernel, by its
    plain twin, and without a GPU."""
    from heavylift.offload.groups import make_group
    from heavylift.offload.optimizer import TieredAdamW
    from heavylift.offload.options import TieredOptions

    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator).bfloat16() for shape in ((1000, 333), (50_001,), (64, 64))]
    runs = []
    monkeypatch.setattr("heavylift.offload.staging.PIECE_NUMEL", 65_536)
    for device, plain in (("cpu", False), ("cuda", False), ("cuda", True)):
        if plain:
            monkeypatch.setattr("heavylift.offload.pieces.cuda_driver", lambda: None)
        params = [torch.nn.Parameter(t.to(device).clone()) for t in start]
        options = TieredOptions(Tier.HOST, 0.9, schedule, max_grad_norm=0.5, num_threads=2)
        options = replace(options, state_format=state_format, gradients_on=gradients_on)
        groups = [make_group("first", [("a", params[0])]), make_group("second", [("b", params[1]), ("c", params[2])])]
        gathered = [group for group in groups if group is not None]
        optimizer = TieredAdamW(params, lr=1e-2, weight_decay=0.1, options=options, groups=gathered)
        runs.append(_ten_steps(optimizer, params))
        optimizer.close()
    for by_host, by_kernel, plainly in zip(*runs, strict=True):
        assert torch.equal(by_host, by_kernel) and torch.equal(by_host, plainly)


@pytest.mark.parametrize("streamed_share", [0.0, 1.0])
def test_a_synchronous_step_waits_for_gradients_that_are_put_together_late(
    streamed_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of several plain parameters lie apart; the device is far behind when they are copied together."""
    from heavylift.offload.groups import Group
    from heavylift.offload.optimizer import TieredAdamW
    from heavylift.offload.options import TieredOptions

    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(n, generator=generator).bfloat16() for n in (70_001, 5000)]
    runs = []
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(t.to(device).clone()) for t in start]
        options = TieredOptions(Tier.HOST, 1.0, Schedule.SYNCHRONOUS, num_threads=2, streamed_share=streamed_share)
        optimizer = TieredAdamW(params, lr=1e-2, options=options)
        for param, numbers in zip(params, start, strict=True):
            param.grad = (numbers * 3).to(device)
        if device == "cuda":
            whole = Group.grads

            def late(group: Group, whole: Callable[[Group], torch.Tensor] = whole) -> torch.Tensor:
                torch.cuda._sleep(400_000_000)
                return whole(group)

            monkeypatch.setattr(Group, "grads", late)
        optimizer.step()
        optimizer.synchronize()
        runs.append([param.detach().cpu() for param in params])
        optimizer.close()
    for by_host, by_gpu in zip(*runs, strict=True):
        assert torch.equal(by_host, by_gpu)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)
