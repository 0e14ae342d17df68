"""Taking an AdamW step back: the native kernel against its twin, both against the step done right at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
from adamw_helpers import (
    DTYPES,
    assert_same_bits,
    assert_same_step,
    draw_state,
    each_isa,
    needs_kernel,
    special_states,
    the_kernel,
    using_isa,
    with_output,
)
from torch import Tensor

from heavylift.offload.adamw import AdamWHyper, adamw_step_
from heavylift.offload.correction import adamw_correct_, adamw_undo_
from heavylift.offload.kernels import Kernel, NativeKernel, PlainKernel, host_kernel
from heavylift.offload.native import ThreadPool
from heavylift.offload.tensors import StepTensors

SIZES = (0, 1, 17, 32768 + 35)
HYPER = AdamWHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=10)
ULP = 2.0**-24  # the largest relative error of one rounding to float32


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_isa(request.param) as name:
        yield name


@pytest.fixture(scope="module")
def pools() -> Iterator[list[ThreadPool]]:
    made = [the_kernel().pool(1), the_kernel().pool(3)]
    yield made
    for pool in made:
        pool.close()


@pytest.fixture(scope="module", params=("plain", pytest.param("native", marks=needs_kernel)))
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    made = host_kernel(request.param == "native", 2)
    assert isinstance(made, NativeKernel if request.param == "native" else PlainKernel)
    yield made
    made.close()


# ---- the native kernel and its twin: the same bits ------------------------------------------------------------


def _compare_with_twin(
    pools: Iterable[ThreadPool], state: list[Tensor], out_dtype: torch.dtype | None, hyper: AdamWHyper
) -> None:
    def results(correct: Callable[..., None], undo: Callable[..., None]) -> dict[str, StepTensors]:
        found = {"correct": with_output(state, out_dtype)}
        correct(found["correct"], hyper, 0.3)
        if hyper.step == 1 or min(hyper.beta1, hyper.beta2) > 0:
            found["undo"] = with_output(state, out_dtype)
            undo(found["undo"], hyper)
        return found

    expected, native_kernel = results(adamw_correct_, adamw_undo_), the_kernel()
    for pool in pools:
        got = results(partial(native_kernel.adamw_correct_, pool), partial(native_kernel.adamw_undo_, pool))
        for name, tensors in expected.items():
            assert_same_step(got[name], tensors, f"{name}, {pool.num_threads} threads, {hyper}")


@needs_kernel
@each_isa
def test_kernel_equals_twin_for_every_size_and_dtype(isa: str, pools: list[ThreadPool]) -> None:
    for n, grad_dtype, out_dtype in product(SIZES, DTYPES, (None, *DTYPES)):
        if n > 10**4 and grad_dtype != out_dtype:
            continue
        _compare_with_twin(pools, draw_state(n, grad_dtype), out_dtype, HYPER)


@needs_kernel
@each_isa
def test_kernel_equals_twin_for_every_hyperparameter(isa: str, pools: list[ThreadPool]) -> None:
    cases = product((1e-3, 0.0), (0.0, 0.1), (1.0, 0.37), (1, 2, 1000), ((0.9, 0.999), (0.0, 0.98), (0.95, 0.0)))
    for seed, (lr, decay, scale, step, (beta1, beta2)) in enumerate(cases):
        hyper = AdamWHyper(lr, beta1, beta2, 1e-8, decay, step, scale)
        _compare_with_twin(pools[1:], draw_state(10_001, torch.bfloat16, seed), torch.bfloat16, hyper)


@needs_kernel
@each_isa
def test_kernel_equals_twin_for_special_values(isa: str, pools: list[ThreadPool]) -> None:
    for step, grad_dtype in product((1, 10), DTYPES):
        out_dtype = torch.float16 if grad_dtype == torch.float16 else torch.bfloat16
        _compare_with_twin(pools, special_states(grad_dtype), out_dtype, replace(HYPER, step=step))


@pytest.mark.gpu
@pytest.mark.parametrize("step", (1, 1000))
def test_twin_has_the_same_bits_on_a_gpu(step: int) -> None:
    hyper = replace(HYPER, step=step)
    for grad_dtype in DTYPES:
        state = draw_state(10**6 + 1, grad_dtype, step)
        for take_back in (partial(adamw_correct_, coefficient=0.3), adamw_undo_):
            on_cpu = with_output(state, torch.bfloat16)
            on_gpu = StepTensors(*(t.cuda() for t in on_cpu.named().values()))
            take_back(on_cpu, hyper=hyper)
            take_back(on_gpu, hyper=hyper)
            got = StepTensors(*(t.cpu() for t in on_gpu.named().values()))
            assert_same_step(got, on_cpu, f"step {step}, {grad_dtype}")


# ---- how exact: against the clipped step, and against the state before the step ---------------------------------


def _training_state(n: int, step: int, grad_dtype: torch.dtype, seed: int = 5) -> tuple[list[Tensor], Tensor]:
    """master, exp_avg, exp_avg_sq as they are before `step`, and its gradient: scales over e^+-8, heavy tails."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(n, generator=generator)

    scale = 1e-3 * torch.exp(2 * normal())
    exp_avg = scale * normal() * math.sqrt((1 - HYPER.beta1) / (1 + HYPER.beta1))
    exp_avg_sq = scale.square() * (1 - HYPER.beta2 ** (step - 1)) * torch.exp(0.7 * normal())
    grad = scale * normal() / torch.exp(normal()).clamp_min(0.05)
    if step == 1:
        exp_avg, exp_avg_sq = torch.zeros(n), torch.zeros(n)
    return [0.02 * normal(), exp_avg, exp_avg_sq], grad.to(grad_dtype)


@dataclass(frozen=True)
class Distance:
    """Of a state to the one it should be. `rel_*`: L2; `worst_*`: one element, relative; `same_*`: bit-equal share."""

    rel_m: float
    rel_v: float
    worst_v: float
    same_m: float
    same_v: float
    same_p: float
    max_dp: float
    num_bf16_differ: int


def _distance(got: list[Tensor], expected: list[Tensor]) -> Distance:
    (p, m, v), (p_right, m_right, v_right) = got, expected

    def relative(a: Tensor, b: Tensor) -> float:
        return ((a.double() - b).norm() / b.double().norm().clamp_min(1e-300)).item()

    return Distance(
        rel_m=relative(m, m_right),
        rel_v=relative(v, v_right),
        worst_v=((v.double() - v_right).abs() / v_right.double().clamp_min(1e-300)).max().item(),
        same_m=(m == m_right).double().mean().item(),
        same_v=(v == v_right).double().mean().item(),
        same_p=(p == p_right).double().mean().item(),
        max_dp=(p - p_right).abs().max().item(),
        num_bf16_differ=int((p.bfloat16() != p_right.bfloat16()).sum()),
    )


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


@pytest.mark.parametrize("coefficient", (0.9, 0.5, 0.1, 0.01, 0.001))
@pytest.mark.parametrize("step", (1, 10, 1000))
def test_corrected_step_is_the_clipped_step_but_for_rounding(step: int, coefficient: float) -> None:
    """The bounds are what was measured on 10^6 elements (docs/log.md) with a little room."""
    hyper, n = replace(HYPER, step=step), 200_000
    for grad_dtype in (torch.bfloat16, torch.float32):
        before, grad = _training_state(n, step, grad_dtype)
        expected, got = _copies(before), _copies(before)
        adamw_step_(StepTensors(*expected, grad, None), replace(hyper, grad_scale=coefficient))
        adamw_step_(StepTensors(*got, grad, None), hyper)
        assert not torch.equal(got[0], expected[0]) and not torch.equal(got[1], expected[1])
        adamw_correct_(StepTensors(*got, grad, None), hyper, coefficient)
        found = _distance(got, expected)
        if step == 1:
            assert found.same_m == found.same_v == 1, found
        assert found.rel_m < 1e-7 and found.rel_v < 1e-7, found
        assert found.worst_v < min(6e-5, 2.0**-23 / coefficient**2 + 4 * ULP), found
        assert found.same_m > 0.68 and found.same_v > (0.98 if step == 1000 else 0.82), found
        assert found.same_p > 0.985 and found.max_dp < 1.5e-8 and found.num_bf16_differ <= 2, found


@pytest.mark.parametrize("step", (1, 10, 1000))
def test_undone_step_is_the_state_before_but_for_rounding(step: int) -> None:
    hyper = replace(HYPER, step=step)
    for grad_dtype in (torch.bfloat16, torch.float32):
        before, grad = _training_state(200_000, step, grad_dtype)
        got = _copies(before)
        adamw_step_(StepTensors(*got, grad, None), hyper)
        adamw_undo_(StepTensors(*got, grad, None), hyper)
        found = _distance(got, before)
        if step == 1:
            assert not got[1].any() and not got[2].any()
        assert found.rel_m < 1e-7 and found.rel_v < 1e-7 and found.worst_v < 6e-5, found
        assert found.same_m > 0.66 and found.same_v > (0.98 if step == 1000 else 0.82), found
        assert found.same_p > 0.98 and found.max_dp < 1.5e-8 and found.num_bf16_differ <= 2, found


def test_after_a_history_of_one_gradient_an_outlier_costs_more() -> None:
    """docs/schedules.md, below its table: scales over e^+-8 and new ones at every step, so that single gradients are
    thousands of times their history; the second moment of such an element can be lost when the step is taken back."""
    n, hyper = 200_000, replace(HYPER, step=2)
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp(16 * torch.rand(n, generator=generator) - 8)
    before = [0.02 * torch.randn(n, generator=generator), torch.zeros(n), torch.zeros(n)]
    grads = [torch.randn(n, generator=generator) * scale for _ in range(2)]
    first, second = (grad * (0.2 / grad.norm()) for grad in grads)
    adamw_step_(StepTensors(*before, first, None), replace(hyper, step=1))
    expected, got, undone = _copies(before), _copies(before), _copies(before)
    adamw_step_(StepTensors(*expected, second, None), replace(hyper, grad_scale=0.001))
    for tensors in (got, undone):
        adamw_step_(StepTensors(*tensors, second, None), hyper)
    adamw_correct_(StepTensors(*got, second, None), hyper, 0.001)
    found = _distance(got, expected)
    assert found.rel_m < 1e-7 and found.rel_v < 1e-7, found
    assert found.max_dp < 4e-6 and found.num_bf16_differ <= 12, found
    adamw_undo_(StepTensors(*undone, second, None), hyper)
    found = _distance(undone, before)
    assert found.rel_m < 1e-7 and found.rel_v < 1e-7 and found.worst_v <= 1, found
    lost = (undone[2] == 0) & (before[2] > 0)
    assert lost.any()
    assert (second[lost].double().square() > before[2][lost].double() * 2**23 / (1 - hyper.beta2)).all(), "no others"


def _update(m: Tensor, v: Tensor, hyper: AdamWHyper) -> Tensor:
    bias1, bias2 = 1 - hyper.beta1**hyper.step, 1 - hyper.beta2**hyper.step
    return -hyper.lr / bias1 * m.double() / ((v.double() / bias2).sqrt() + hyper.eps)


@pytest.mark.parametrize("betas", ((0.9, 0.999), (0.95, 0.95), (0.5, 0.9)))
def test_error_is_bounded_whatever_the_gradient(betas: tuple[float, float]) -> None:
    """Gradients up to 2^36 times their history: the error is a few roundings of the larger of the two.

    So an outlier costs precision of the state, never more; see `adamw_correct_`.
    """
    hyper = replace(HYPER, beta1=betas[0], beta2=betas[1])
    for seed, coefficient in enumerate((0.9, 0.03, 1e-4)):
        *before, grad = draw_state(200_000, torch.float32, seed)
        expected, spoilt, got = _copies(before), _copies(before), _copies(before)
        adamw_step_(StepTensors(*expected, grad, None), replace(hyper, grad_scale=coefficient))
        adamw_step_(StepTensors(*spoilt, grad, None), hyper)
        adamw_step_(StepTensors(*got, grad, None), hyper)
        adamw_correct_(StepTensors(*got, grad, None), hyper, coefficient)
        assert (got[2] >= 0).all()
        m_error = (got[1].double() - expected[1]).abs()
        largest = torch.maximum(before[1].abs(), (1 - hyper.beta1) * grad.abs())
        assert (m_error <= 8 / hyper.beta1 * ULP * largest).all(), (m_error / (ULP * largest)).max()
        v_error = (got[2].double() - expected[2]).abs()
        assert (v_error <= 4 * ULP * spoilt[2] + 1e-44).all(), (v_error / (ULP * spoilt[2])).max()
        moved = _update(*got[1:], hyper) - _update(*expected[1:], hyper)
        scale = torch.stack([before[0].double(), *(_update(*s[1:], hyper) for s in (expected, spoilt))]).abs().amax(0)
        p_error = (got[0].double() - expected[0]).abs() - moved.abs()
        assert (p_error <= 16 * ULP * scale).all(), (p_error / (ULP * scale)).max()


def test_what_must_not_move_does_not(kernel: Kernel) -> None:
    before, grad = _training_state(10_000, 10, torch.bfloat16)
    grad[::2] = 0
    out = torch.empty(10_000, dtype=torch.bfloat16)
    stepped = _copies(before)
    kernel.step(StepTensors(*stepped, grad, out), HYPER)
    got = _copies(stepped)
    kernel.correct(StepTensors(*got, grad, out), HYPER, 0.01)
    for name, tensor, old in zip(("master", "exp_avg", "exp_avg_sq"), got, stepped, strict=True):
        assert_same_bits(tensor[::2], old[::2], f"{name} where the gradient is 0")
        assert (tensor[1::2] != old[1::2]).double().mean() > 0.5, f"{name} did not move where it should"
    standing = replace(HYPER, lr=0.0)
    for take_back in (partial(kernel.correct, coefficient=0.01), kernel.undo):
        got = _copies(before)
        got[0][0] = -0.0
        master = got[0].clone()
        kernel.step(StepTensors(*got, grad, out), standing)
        take_back(StepTensors(*got, grad, out), hyper=standing)
        assert_same_bits(got[0], master, "master with lr 0")
        assert_same_bits(out, master.bfloat16(), "param_out with lr 0")


def test_a_scaled_gradient_is_clipped_on_top_of_its_scale() -> None:
    before, grad = _training_state(50_000, 10, torch.float32)
    hyper = replace(HYPER, grad_scale=0.25)
    expected, got, undone = _copies(before), _copies(before), _copies(before)
    adamw_step_(StepTensors(*expected, grad, None), replace(hyper, grad_scale=0.25 * 0.1))
    adamw_step_(StepTensors(*got, grad, None), hyper)
    adamw_correct_(StepTensors(*got, grad, None), hyper, 0.1)
    assert _distance(got, expected).rel_m < 1e-7 and _distance(got, expected).rel_v < 1e-7
    adamw_step_(StepTensors(*undone, grad, None), hyper)
    adamw_undo_(StepTensors(*undone, grad, None), hyper)
    assert _distance(undone, before).rel_m < 1e-7 and _distance(undone, before).rel_v < 1e-7


def test_a_beta_of_zero_can_be_corrected_and_not_undone() -> None:
    before, grad = _training_state(50_000, 10, torch.float32)
    for hyper in (replace(HYPER, beta1=0.0), replace(HYPER, beta2=0.0)):
        expected, got = _copies(before), _copies(before)
        adamw_step_(StepTensors(*expected, grad, None), replace(hyper, grad_scale=0.1))
        adamw_step_(StepTensors(*got, grad, None), hyper)
        adamw_correct_(StepTensors(*got, grad, None), hyper, 0.1)
        found = _distance(got, expected)
        assert found.rel_m < 2e-7 and found.rel_v < 2e-7 and found.same_p > 0.95, found
        with pytest.raises(AssertionError, match="beta of 0 leaves no trace"):
            adamw_undo_(StepTensors(*got, grad, None), hyper)


# ---- a run with many strikes ------------------------------------------------------------------------------------


def _train(kernel: Kernel, when: str, num_steps: int, n: int) -> tuple[list[Tensor], Tensor, int]:
    """A noisy quadratic with bf16 weights; 30% of the steps are clipped, 5% must not happen. Returns also their number.

    `when` that is known: "before" the step, "after" it (taken back), or "never" (the control).
    """
    generator = torch.Generator().manual_seed(11)
    curvature = torch.exp(torch.randn(n, generator=generator))
    target = 0.02 * torch.randn(n, generator=generator)
    state = [0.02 * torch.randn(n, generator=generator), torch.zeros(n), torch.zeros(n)]
    param = state[0].bfloat16()
    step, num_strikes = 1, 0
    for _ in range(num_steps):
        noise = torch.randn(n, generator=generator) / torch.rand(n, generator=generator).clamp_min(0.01)
        grad = (curvature * (param.float() - target) + 0.01 * noise).bfloat16()
        strike, exponent = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        coefficient = 10.0 ** (-0.05 - 2.95 * exponent) if strike < 0.3 else 1.0
        skip = strike > 0.95
        num_strikes += skip or coefficient < 1
        hyper = replace(HYPER, step=step)
        if when == "before":
            if not skip:
                kernel.step(StepTensors(*state, grad, param), replace(hyper, grad_scale=coefficient))
        else:
            kernel.step(StepTensors(*state, grad, param), hyper)
            if when == "after" and skip:
                kernel.undo(StepTensors(*state, grad, param), hyper)
            elif when == "after" and coefficient < 1:
                kernel.correct(StepTensors(*state, grad, param), hyper, coefficient)
        step += not skip
    return state, param, num_strikes


def test_many_strikes_do_not_add_up() -> None:
    """100 steps of 300 are taken back, and the weights stay where those of the exact run are (lr is 1e-4)."""
    kernel = host_kernel(True, 2)
    exact, exact_param, num_strikes = _train(kernel, "before", 300, 100_000)
    got, param, _ = _train(kernel, "after", 300, 100_000)
    control = _distance(_train(kernel, "never", 100, 10_000)[0], _train(kernel, "before", 100, 10_000)[0])
    kernel.close()
    found = _distance(got, exact)
    rms_dp = (got[0] - exact[0]).double().square().mean().sqrt().item()
    assert num_strikes == 100
    assert control.max_dp > 1e-3 and control.num_bf16_differ > 5_000, control
    assert rms_dp < 1e-8 and found.max_dp < 2e-6, (rms_dp, found)
    assert found.rel_m < 1e-5 and found.rel_v < 1e-6, found
    assert int((param != exact_param).sum()) <= 30


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficient", (0.0, 1.0, 1.5, -0.1, math.nan))
def test_a_coefficient_that_clips_nothing_is_refused(kernel: Kernel, coefficient: float) -> None:
    tensors = [torch.zeros(8) for _ in range(5)]
    with pytest.raises(AssertionError, match="between 0 and 1"):
        kernel.correct(StepTensors(*tensors), HYPER, coefficient)


def test_wrong_tensors_are_refused(kernel: Kernel) -> None:
    good = [torch.zeros(8) for _ in range(5)]
    for index, bad, message in (
        (0, torch.zeros(8, dtype=torch.bfloat16), "master has dtype"),
        (3, torch.zeros(8, dtype=torch.float64), "grad has dtype"),
        (1, torch.zeros(9), "exp_avg has shape"),
    ):
        tensors = [bad if i == index else t for i, t in enumerate(good)]
        with pytest.raises(AssertionError, match=message):
            kernel.correct(StepTensors(*tensors), HYPER, 0.5)
        with pytest.raises(AssertionError, match=message):
            kernel.undo(StepTensors(*tensors), HYPER)
    with pytest.raises(AssertionError, match="leaves nothing of the weights"):
        kernel.undo(StepTensors(*good), replace(HYPER, lr=1.0, weight_decay=1.0))


@needs_kernel
def test_overlapping_tensors_are_refused(pools: list[ThreadPool]) -> None:
    kernel, (a, b, c, d) = the_kernel(), (torch.zeros(8) for _ in range(4))
    for take_back in (partial(kernel.adamw_correct_, coefficient=0.5), kernel.adamw_undo_):
        with pytest.raises(AssertionError, match="overlap"):
            take_back(pools[0], StepTensors(a, b, c, d, a), hyper=HYPER)
        with pytest.raises(AssertionError, match="strides"):
            take_back(pools[0], StepTensors(a, b, c, d, torch.zeros(16)[::2]), hyper=HYPER)
