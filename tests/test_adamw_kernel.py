"""The native CPU kernel against its plain PyTorch twin, bit for bit, and the twin against torch.optim.AdamW."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from adamw_helpers import (
    DTYPES,
    ISAS,
    KERNEL,
    SPECIALS,
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

from heavylift.offload import native
from heavylift.offload.adamw import AdamWHyper, adamw_step_
from heavylift.offload.native import ThreadPool
from heavylift.offload.tensors import StepTensors

SIZES = (0, 1, 7, 15, 16, 17, 1000, 65536 + 3, 10**6 + 1)
HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, ThreadPool]]:
    kernel = the_kernel()
    made = {num_threads: kernel.pool(num_threads) for num_threads in (1, 2, 3)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_isa(request.param) as name:
        yield name


def _hyper(**changes: float) -> AdamWHyper:
    return AdamWHyper(**{**vars(HYPER), **changes})


def _compare_step(
    pools: Iterable[ThreadPool], state: list[Tensor], out_dtype: torch.dtype | None, hyper: AdamWHyper
) -> None:
    expected = with_output(state, out_dtype)
    adamw_step_(expected, hyper)
    for pool in pools:
        got = with_output(state, out_dtype)
        the_kernel().adamw_step_(pool, got, hyper)
        assert_same_step(got, expected, f"{pool.num_threads} threads, {hyper}")


@needs_kernel
@each_isa
def test_kernel_equals_twin_for_every_size_dtype_and_thread_count(isa: str, pools: dict[int, ThreadPool]) -> None:
    for n, grad_dtype, out_dtype in product(SIZES, DTYPES, (None, *DTYPES)):
        if n > 10**5 and grad_dtype != out_dtype:
            continue
        _compare_step(pools.values(), draw_state(n, grad_dtype), out_dtype, _hyper(step=2))


@needs_kernel
@each_isa
def test_kernel_equals_twin_for_every_hyperparameter(isa: str, pools: dict[int, ThreadPool]) -> None:
    cases = product((1e-3, 0.37), (0.0, 0.1), (1.0, 0.37), (1, 2, 1000), ((0.9, 0.999), (0.0, 0.0), (0.95, 0.98)))
    for seed, (lr, decay, scale, step, (beta1, beta2)) in enumerate(cases):
        hyper = AdamWHyper(lr, beta1, beta2, 1e-8, decay, step, scale)
        _compare_step([pools[2]], draw_state(40_001, torch.bfloat16, seed), torch.bfloat16, hyper)


@needs_kernel
@each_isa
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_kernel_equals_twin_for_special_values(isa: str, grad_dtype: torch.dtype, pools: dict[int, ThreadPool]) -> None:
    for lr, scale, out_dtype in product((0.0, 1e-3), (1.0, 0.37), DTYPES):
        _compare_step([pools[3]], special_states(grad_dtype), out_dtype, _hyper(lr=lr, grad_scale=scale))


@needs_kernel
@each_isa
def test_unaligned_slices(isa: str, pools: dict[int, ThreadPool]) -> None:
    n = 70_001
    for offset in (1, 3):
        state = [torch.cat([torch.zeros(offset, dtype=t.dtype), t])[offset:] for t in draw_state(n, torch.bfloat16)]
        expected, got = [t.clone() for t in state], [t[:] for t in state]
        outs = torch.zeros(n + offset, dtype=torch.bfloat16)[offset:], torch.zeros(n, dtype=torch.bfloat16)
        assert got[0].data_ptr() % 16 != 0
        the_kernel().adamw_step_(pools[2], StepTensors(*got, outs[0]), HYPER)
        adamw_step_(StepTensors(*expected, outs[1]), HYPER)
        assert_same_bits(got[0], expected[0], "master")
        assert_same_bits(outs[0], outs[1], "param_out")


def test_rounding_to_bfloat16_is_to_nearest_even() -> None:
    # 1 + 2^-8 lies in the middle of two bf16 numbers: ties go to the even one, down here and up for 1 + 3 * 2^-8
    master = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    out = torch.empty(3, dtype=torch.bfloat16)
    state = [master, torch.zeros(3), torch.zeros(3), torch.zeros(3)]
    expected = [1.0, 1 + 2**-6, 1 + 2**-7]
    adamw_step_(StepTensors(*state, out), _hyper(lr=0.0))
    assert out.tolist() == expected
    if KERNEL is not None:
        with KERNEL.pool(1) as pool:
            KERNEL.adamw_step_(pool, StepTensors(*state, out.zero_()), _hyper(lr=0.0))
        assert out.tolist() == expected


def test_lr_zero_keeps_the_bits_of_the_master_and_moves_the_moments() -> None:
    master, exp_avg, exp_avg_sq, grad = draw_state(1000, torch.float32)
    master[:3], grad[:3] = torch.tensor([-0.0, 0.0, 1.0]), torch.tensor([1.0, -0.0, math.nan])
    before, moment_before = master.clone(), exp_avg.clone()
    adamw_step_(StepTensors(master, exp_avg, exp_avg_sq, grad, None), _hyper(lr=0.0))
    assert torch.equal(master.view(torch.int32), before.view(torch.int32))
    assert (exp_avg != moment_before).float().mean() > 0.99


@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
def test_twin_follows_torch_optim(weight_decay: float) -> None:
    torch.manual_seed(3)
    n, lr = 5000, 1e-3
    param = torch.nn.Parameter(torch.randn(n))
    reference = torch.optim.AdamW([param], lr=lr, weight_decay=weight_decay, foreach=False)
    master, exp_avg, exp_avg_sq = param.detach().clone(), torch.zeros(n), torch.zeros(n)
    for step in range(1, 21):
        grad = torch.randn(n)
        param.grad = grad.clone()
        reference.step()
        adamw_step_(
            StepTensors(master, exp_avg, exp_avg_sq, grad, None), _hyper(lr=lr, weight_decay=weight_decay, step=step)
        )
    state = reference.state[param]
    # 20 steps of at most lr each, every one rounded a few times at |p| ~ 1 (2^-24 = 6e-8); the moments near 0 by
    # cancellation are compared on the scale of a gradient
    torch.testing.assert_close(master, param.detach(), rtol=1e-6, atol=1e-6 * lr * 20)
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-6, atol=0)


def test_twin_rounds_every_operation_once() -> None:
    """Against exact scalar arithmetic in double, rounded after each operation (no fused multiply-add anywhere)."""
    state = draw_state(300, torch.float32, seed=5)
    s = HYPER.scalars()

    def f32(x: float) -> float:
        return torch.tensor(x, dtype=torch.float64).float().item()

    expected = []
    for p, m, v, g in zip(*(t.tolist() for t in state), strict=True):
        m = f32(m + f32(s.one_minus_beta1 * f32(g - m)))
        v = f32(f32(v * s.beta2) + f32(f32(s.one_minus_beta2 * g) * g))
        denom = f32(f32(f32(math.sqrt(v)) / s.bias2_sqrt) + s.eps)
        expected.append(f32(f32(p * s.decay) + f32(f32(s.neg_step_size * m) / denom)))
    adamw_step_(StepTensors(*state, None), HYPER)
    assert_same_bits(state[0], torch.tensor(expected), "master")


@needs_kernel
@each_isa
def test_denormals_survive_a_caller_that_flushes_them(isa: str, pools: dict[int, ThreadPool]) -> None:
    for n in (8, 100_000):  # on the calling thread; on the pool
        acc, grad = torch.full((n,), 1e-40), torch.full((n,), 2e-40)
        expected = (acc + grad).view(torch.int32)
        assert torch.set_flush_denormal(True)
        try:
            the_kernel().accumulate_(pools[2], acc, grad)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(acc.view(torch.int32), expected) and expected[0] != 0


@needs_kernel
@each_isa
def test_accumulate_is_exact(isa: str, pools: dict[int, ThreadPool]) -> None:
    for n, dtype, pool in product(SIZES, DTYPES, pools.values()):
        acc, grad = torch.randn(n), torch.randn(n).to(dtype)
        expected = acc + grad.float()
        the_kernel().accumulate_(pool, acc, grad)
        assert_same_bits(acc, expected, "acc")


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares(dtype: torch.dtype, pools: dict[int, ThreadPool]) -> None:
    kernel, before = the_kernel(), the_kernel().isa
    for n in SIZES:
        x = draw_state(n, dtype)[3]
        results = set()
        for isa, pool in product(ISAS, pools.values()):
            kernel.set_isa(isa)
            results.add(kernel.sum_squares(pool, x))
        kernel.set_isa(before)
        assert len(results) == 1, f"n={n}: depends on threads or instruction set: {results}"
        assert results.pop() == pytest.approx(x.double().square().sum().item(), rel=1e-13)


@needs_kernel
def test_sum_squares_of_large_and_non_finite_values(pools: dict[int, ThreadPool]) -> None:
    x = torch.full((100_000,), 1e30)
    assert the_kernel().sum_squares(pools[2], x) == pytest.approx(x[0].double().item() ** 2 * 1e5, rel=1e-12)
    x[77_777] = math.inf
    assert the_kernel().sum_squares(pools[2], x) == math.inf
    x[99_999] = math.nan
    assert math.isnan(the_kernel().sum_squares(pools[2], x))


@needs_kernel
def test_probe_moves_what_it_says(pools: dict[int, ThreadPool]) -> None:
    a, b, c = torch.zeros(50_001), torch.ones(50_001), torch.full((50_001,), 2.0)
    source, out = torch.randn(50_001).bfloat16(), torch.zeros(50_001, dtype=torch.bfloat16)
    the_kernel().bandwidth_probe(pools[2], a, b, c, source, out)
    assert torch.equal(a, source.float()) and torch.equal(b, source.float() + 1) and torch.equal(c, source.float() + 2)
    assert torch.equal(out, source)


def _thread_cpus() -> dict[int, str]:
    cpus = {}
    for task in Path("/proc/self/task").iterdir():
        status = (task / "status").read_text()
        if "heavylift-cpu" in status.splitlines()[0]:
            allowed = next(line for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
            cpus[int(task.name)] = allowed.split()[1]
    return cpus


@needs_kernel
def test_threads_are_pinned_and_end_with_the_pool() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    before = _thread_cpus()
    wanted = [allowed[0], allowed[-1], allowed[-1]]
    pool = the_kernel().pool(3, wanted)
    new = {task: cpus for task, cpus in _thread_cpus().items() if task not in before}
    assert sorted(new.values()) == sorted(map(str, wanted))
    _compare_step([pool], draw_state(100_000, torch.float32), None, HYPER)
    pool.close()
    pool.close()
    assert not set(new) & set(_thread_cpus())
    with pytest.raises(AssertionError, match="closed"):
        the_kernel().sum_squares(pool, torch.ones(1))


@needs_kernel
def test_a_pool_tells_when_each_thread_had_work() -> None:
    before = set(_thread_cpus())
    with the_kernel().pool(2) as pool:
        acc, grad = torch.zeros(2_000_000), torch.ones(2_000_000)
        threads = set(_thread_cpus()) - before
        assert pool.take_spans() == []
        the_kernel().accumulate_(pool, acc[:100], grad[:100])  # by the caller
        assert pool.take_spans() == []
        calls, taken = [], []
        for _ in range(3):
            start_s = time.perf_counter()
            the_kernel().accumulate_(pool, acc, grad)
            calls.append((start_s, time.perf_counter()))
            taken.append(pool.take_spans())
        for (start_s, stop_s), spans in zip(calls, taken, strict=True):
            # a thread that came late found nothing left to do
            assert 1 <= len(spans) == len({span.thread for span in spans}) <= 2
            assert {span.thread for span in spans} <= threads
            assert all(start_s <= span.start_s < span.stop_s <= stop_s for span in spans)
        for _ in range(10_000):  # more than are kept, of one of the two at least
            the_kernel().accumulate_(pool, acc[:40_000], grad[:40_000])
        kept = pool.take_spans()
        per_thread = [[span for span in kept if span.thread == thread] for thread in threads]
        assert max(map(len, per_thread)) == 4096
        assert all(one.stop_s <= two.start_s for spans in per_thread for one, two in pairwise(spans))
        assert pool.take_spans() == []


@needs_kernel
def test_a_cpu_that_is_not_there_is_refused() -> None:
    before = _thread_cpus()
    for cpus in ([0, 10**6], [0, -1]):
        with pytest.raises(OSError, match="could not start 2 threads"):
            the_kernel().pool(2, cpus)
    with pytest.raises(OSError, match=r"could not start 3 threads on 2 CPUs \(1000000, 1000001\) \("):
        the_kernel().pool(3, [10**6, 10**6 + 1, 10**6])
    with pytest.raises(OSError) as caught:
        the_kernel().pool(500, range(10**6, 10**6 + 500))
    assert "on 500 CPUs (1000000, 1000001, " in str(caught.value) and len(str(caught.value)) < 200
    assert _thread_cpus() == before


@needs_kernel
def test_one_pool_serves_many_calls_and_python_threads(pools: dict[int, ThreadPool]) -> None:
    accs = [torch.zeros(70_000) for _ in range(4)]
    grad = torch.ones(70_000)

    def add(acc: Tensor) -> None:
        for _ in range(100):
            the_kernel().accumulate_(pools[3], acc, grad)

    threads = [threading.Thread(target=add, args=(acc,)) for acc in accs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((acc == 100).all() for acc in accs)


_FORK = """
import os, torch
from heavylift.offload import native
kernel = native.load()
pool = kernel.pool(2)
x = torch.ones(300_000)
assert kernel.sum_squares(pool, x) == 300_000
child = os.fork()
if child == 0:
    good = kernel.sum_squares(pool, x) == 300_000
    with kernel.pool(2) as own:
        good = good and kernel.sum_squares(own, x) == 300_000
    pool.close()
    os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert kernel.sum_squares(pool, x) == 300_000
"""
_EXIT_WHILE_BUSY = """
import threading, torch
from heavylift.offload import native
kernel = native.load()
pool = kernel.pool(2)
acc, grad, started = torch.zeros(2_000_000), torch.ones(2_000_000), threading.Event()
def forever():
    while True:
        kernel.accumulate_(pool, acc, grad)
        started.set()
threading.excepthook = lambda _: None  # "pool is closed", at exit
threading.Thread(target=forever, daemon=True).start()
started.wait()
"""


@needs_kernel
@pytest.mark.parametrize("script", (_FORK, _EXIT_WHILE_BUSY), ids=("after_fork", "exit_while_busy"))
def test_process_life(script: str) -> None:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@needs_kernel
def test_idle_threads_sleep() -> None:
    """A pool between two steps must not burn CPU."""
    before = _thread_cpus()
    with the_kernel().pool(2) as pool:
        the_kernel().sum_squares(pool, torch.ones(100_000))
        tasks = [task for task in _thread_cpus() if task not in before]
        assert len(tasks) == 2
        for _ in range(100):  # the short spin after a call has to end
            states = [Path(f"/proc/self/task/{task}/stat").read_text().rsplit(")", 1)[1].split()[0] for task in tasks]
            if states == ["S", "S"]:
                break
            time.sleep(0.05)
    assert states == ["S", "S"]


@needs_kernel
def test_wrong_tensors_are_refused(pools: dict[int, ThreadPool]) -> None:
    def step(*tensors: Tensor) -> None:
        the_kernel().adamw_step_(pools[1], StepTensors(*tensors), HYPER)

    good = [torch.zeros(8) for _ in range(5)]
    step(*good)
    for index, bad, message in (
        (0, torch.zeros(8, dtype=torch.bfloat16), "master has dtype"),
        (3, torch.zeros(8, dtype=torch.float64), "grad has dtype"),
        (1, torch.zeros(9), "exp_avg has shape"),
        (4, torch.zeros(16)[::2], "strides"),
        (2, good[1], "overlap"),
        (4, torch.zeros(8, device="meta"), "param_out is on meta"),
    ):
        with pytest.raises(AssertionError, match=message):
            step(*[bad if i == index else t for i, t in enumerate(good)])
    with pytest.raises(ValueError, match="expected one of"):
        the_kernel().set_isa("mmx")


def test_step_counts_from_one() -> None:
    with pytest.raises(AssertionError, match="step counts from 1"):
        _hyper(step=0)


def test_missing_and_broken_library_fall_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_load = native.load.__wrapped__
    monkeypatch.setattr(native, "LIBRARY_NAME", "_absent.so")
    assert fresh_load() is None
    assert "install g++" in caplog.text
    (tmp_path / "_absent.so").write_bytes(b"not a library")
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    assert fresh_load() is None
    assert "does not load" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_twin_has_the_same_bits_on_a_gpu(grad_dtype: torch.dtype) -> None:
    specials = torch.tensor(SPECIALS)
    for lr, scale, step in product((0.0, 1e-3), (1.0, 0.37), (1, 1000)):
        state = draw_state(10**6 + 1, grad_dtype, step)
        state[3][: len(SPECIALS)] = specials.to(grad_dtype)
        on_cpu = with_output(state, torch.float16 if grad_dtype == torch.float16 else torch.bfloat16)
        on_gpu = StepTensors(*(t.cuda() for t in on_cpu.named().values()))
        hyper = _hyper(lr=lr, grad_scale=scale, step=step)
        adamw_step_(on_cpu, hyper)
        adamw_step_(on_gpu, hyper)
        assert_same_step(StepTensors(*(t.cpu() for t in on_gpu.named().values())), on_cpu, f"{hyper}")
