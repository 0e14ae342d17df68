"""Gradients of micro-batches added on the worker: the bits of adding at once, nobody held up while there is room, and
what fails there is heard of here. Ends by order, not by time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import Rows, make_steps
from ranks.pool import run_on_ranks
from ranks.schedules import Tensors, local_tensors
from ranks.sharded import Setup, build, take_step

from heavylift.config.schema import Schedule
from heavylift.offload.additions import HostAdditions
from heavylift.offload.kernels import PlainKernel
from heavylift.offload.stepping import PartStepper
from heavylift.offload.streams import Streams
from heavylift.offload.timeline import Activity, Timeline
from heavylift.offload.worker import Worker
from heavylift.train.waits import WaitWatch

CPU = torch.device("cpu")


class HeldKernel(PlainKernel):
    """Adds only while it is not held; fails on demand."""

    def __init__(self) -> None:
        self.may_add = threading.Event()
        self.may_add.set()
        self.fails = False

    def accumulate(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        """total += grad."""
        self.may_add.wait()
        if self.fails:
            raise MemoryError("no")
        super().accumulate(total, grad)


class Bench:
    """Additions over a ring of 4 slots of 5 elements each."""

    def __init__(self) -> None:
        self.kernel, self.timeline = HeldKernel(), Timeline()
        self.worker = Worker(CPU, self.timeline)
        stepper = PartStepper(self.kernel, PlainKernel(), None, Streams(CPU), self.timeline)
        self.additions = HostAdditions(self.worker, stepper, torch.zeros(20), num_slots=4)

    def add(self, target: torch.Tensor, grad: torch.Tensor) -> None:
        """One gradient of a group of its own."""
        self.additions.add(0, "group", target, grad)
        self.additions.hand_over(0, "group")


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.kernel.may_add.set()
    made.worker.close()


def test_the_bits_are_those_of_adding_in_turn(bench: Bench) -> None:
    """Pieces smaller and larger than a slot, and empty ones; sums whose order shows in float32."""
    generator = torch.Generator().manual_seed(0)
    totals = [torch.zeros(n) for n in (1, 4, 5, 6, 0, 37, 20)]
    expected = [total.clone() for total in totals]
    for step in range(30):
        for total, plain in zip(totals, expected, strict=True):
            grad = torch.randn(total.numel(), generator=generator) * 10.0 ** (step % 7)
            plain += grad
            bench.additions.add(0, "group", total, grad)
            grad.fill_(float("nan"))  # the caller may do what it likes with it
        if step % 3 == 0:
            bench.additions.hand_over(0, "group")
    bench.additions.settle()
    for total, plain in zip(totals, expected, strict=True):
        assert torch.equal(total, plain)


def test_narrow_gradients_are_widened(bench: Bench) -> None:
    total, grad = torch.full((7,), 1e-3), torch.linspace(-3, 3, 7).bfloat16()
    expected = total + grad.float()
    bench.add(total, grad)
    bench.additions.settle()
    assert torch.equal(total, expected)


def test_nobody_waits_while_there_is_a_free_slot(bench: Bench) -> None:
    total = torch.zeros(5)
    bench.kernel.may_add.clear()
    for _ in range(4):  # returns although nothing can be added: one slot each
        bench.add(total, torch.ones(5))
    assert torch.equal(total, torch.zeros(5))
    fifth = threading.Thread(target=bench.add, args=(total, torch.ones(5)))
    fifth.start()
    fifth.join(0.2)
    assert fifth.is_alive(), "the ring is full: the fifth has to wait"
    assert bench.worker.num_pending == 4
    bench.kernel.may_add.set()
    fifth.join()
    bench.additions.settle()
    assert torch.equal(total, torch.full((5,), 5.0))


def test_who_waited_and_who_added_is_recorded(bench: Bench) -> None:
    bench.kernel.may_add.clear()
    threading.Timer(0.1, bench.kernel.may_add.set).start()
    total = torch.zeros(30)
    bench.add(total, torch.ones(30))  # six slots' worth in a ring of four
    bench.additions.settle()
    ranges = bench.timeline.take()
    worker, here = bench.worker.thread_id, threading.get_native_id()
    assert {r.thread for r in ranges if r.activity is Activity.ACCUMULATE} == {worker}
    assert sum(r.activity is Activity.ACCUMULATE for r in ranges) == 6
    slots = [r for r in ranges if r.activity is Activity.SLOT]
    assert slots and {(r.thread, r.label) for r in slots} == {(here, "group")}
    waits = WaitWatch((worker,)).step(1, Schedule.DEFERRED, ranges, 0.0)
    assert waits.slot_s == 0 and waits.drain_s >= sum(r.seconds for r in slots) > 0
    assert waits.hidden is not None and waits.hidden < 1 and waits.exposed_s <= waits.accumulate_s


def test_an_error_on_the_worker_is_raised_here_and_nothing_hangs(bench: Bench) -> None:
    bench.kernel.fails = True
    total = torch.zeros(5)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(9):  # more than there are slots
            bench.add(total, torch.ones(5))
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(RuntimeError):
        bench.additions.settle()
    with pytest.raises(RuntimeError):
        bench.worker.drain()


# ---- in training ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("models") / "odd", tied=False)


def accumulated_job(folder: Path, setup: Setup, steps: list[Rows]) -> tuple[Tensors, list[float], list[str]]:
    """This rank's bits after the steps, the norms, and on which threads gradients were added."""
    engine = build(folder, setup)
    optimizer = engine.optimizer
    norms = [take_step(engine, rows, setup.accumulation).grad_norm for rows in steps]
    tensors = local_tensors(engine)
    here = threading.get_native_id()
    added = [r for r in optimizer.timeline.take() if r.activity is Activity.ACCUMULATE]
    lanes = ["here" if r.thread == here else "worker" for r in added if r.thread in (here, *optimizer.worker_threads)]
    optimizer.close()
    return tensors, norms, sorted(set(lanes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [1.0, 0.37])
def test_backward_leaves_the_additions_to_the_worker_and_no_bit_changes(
    ratio: float, dtype: torch.dtype, odd_llama: Path
) -> None:
    steps = make_steps(4, VOCAB)
    setup = Setup(accumulation=4, clip=0.5, dtype=dtype, ratio=ratio)
    plain = run_on_ranks(2, accumulated_job, odd_llama, setup, steps)
    deferred = Setup(accumulation=4, clip=0.5, dtype=dtype, ratio=ratio, schedule="deferred")
    beside = run_on_ranks(2, accumulated_job, odd_llama, deferred, steps)
    for (tensors, norms, lanes), (other, other_norms, other_lanes) in zip(plain, beside, strict=True):
        assert lanes == ["here"] and other_lanes == ["worker"]
        assert norms == other_norms
        assert [name for name, tensor in tensors.items() if not torch.equal(tensor, other[name])] == []


def failing_job(folder: Path, setup: Setup, steps: list[Rows]) -> str:
    """What the training thread hears of an addition that fails."""
    engine = build(folder, setup)

    def fail(*_: object) -> None:
        raise MemoryError("the host is full")

    engine.optimizer._stepper.host.accumulate = fail  # type: ignore[method-assign]
    try:
        take_step(engine, steps[0], setup.accumulation)
    except RuntimeError as error:
        engine.optimizer.close()
        return repr(error.__cause__)
    return "nothing"


def test_a_failed_addition_ends_the_step(odd_llama: Path) -> None:
    setup = Setup(accumulation=2, schedule="deferred")
    assert run_on_ranks(1, failing_job, odd_llama, setup, make_steps(1, VOCAB)) == ["MemoryError('the host is full')"]


class FakeEvent:
    """Of a copy that is done, or not."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        """Whether the device has passed it."""
        return self.done


def held_job(folder: Path, setup: Setup, steps: list[Rows]) -> int:
    """How many reduced gradients are still held after a step that left three copied and one not."""
    engine = build(folder, setup)
    overlap = engine.optimizer._overlap
    assert overlap is not None
    overlap._in_flight.extend((FakeEvent(done), torch.zeros(1)) for done in (True, True, True, False, True))  # type: ignore[misc]
    take_step(engine, steps[0])
    engine.optimizer.close()
    return len(overlap._in_flight)


def test_copied_gradients_are_let_go_of_before_the_next_forward(odd_llama: Path) -> None:
    """Without accumulation; in order, as the copies are made."""
    setup = Setup(schedule="deferred")
    assert run_on_ranks(1, held_job, odd_llama, setup, make_steps(1, VOCAB)) == [2]
