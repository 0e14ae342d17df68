"""The thread that steps the host tier: its order, its errors, and that it ends when nobody owns it any more."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from conftest import command_env
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.sharded import Setup, build, take_step

from heavylift.offload.gates import Gate
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.timeline import Timeline
from heavylift.offload.worker import Worker

STEPS = make_steps(2, VOCAB)


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("models") / "odd", tied=False)


def test_the_worker_turns_to_forward_order_and_keeps_each_groups_own() -> None:
    worker = Worker(torch.device("cpu"), Timeline())
    gates = [Gate() for _ in range(4)]
    begun, go_on, done = threading.Event(), threading.Event(), []

    def task(place: int, name: str) -> None:
        def run() -> None:
            if name == "first":
                begun.set()
                assert go_on.wait(10)
            done.append((place, name))
            gates[place].open(None)

        worker.submit(place, gates[place], run)

    task(3, "first")
    assert begun.wait(10)
    for place in (2, 1, 0):  # as backward brings them
        task(place, "step")
    task(1, "correct")
    worker.turn_to_forward_order()
    go_on.set()
    worker.drain()
    worker.close()
    assert done == [(3, "first"), (0, "step"), (1, "step"), (1, "correct"), (2, "step")]


def test_of_what_backward_brought_the_newest_that_has_arrived_is_done_first() -> None:
    worker = Worker(torch.device("cpu"), Timeline())
    gates = [Gate() for _ in range(6)]
    begun, arrived, done = threading.Event(), set(), []
    may_go_on = {place: threading.Event() for place in range(6)}

    def task(place: int) -> None:
        def run() -> None:
            done.append(place)
            begun.set()
            assert may_go_on[place].wait(10)
            gates[place].open(None)

        worker.submit(place, gates[place], run, lambda: place in arrived)

    def let(place: int, then: int) -> None:
        begun.clear()
        may_go_on[place].set()
        assert begun.wait(10)
        assert done[-1] == then

    task(5)  # nothing has arrived: the oldest
    assert begun.wait(10)
    for place in (4, 3, 2, 1, 0):
        task(place)
    arrived |= {4, 3}
    let(5, then=3)
    let(3, then=4)
    let(4, then=2)
    arrived.add(1)
    worker.turn_to_forward_order()  # whatever has arrived: by now 1
    let(2, then=0)
    let(0, then=1)
    may_go_on[1].set()
    worker.drain()
    worker.close()


def test_a_device_that_fails_when_it_is_asked_is_told_of_by_the_task() -> None:
    """And does not end the thread, for which readers would wait for ever."""
    worker = Worker(torch.device("cpu"), Timeline())
    gate = Gate()

    def fail() -> bool:
        raise RuntimeError("an illegal memory access")

    worker.submit(0, gate, lambda: bool(fail()) and None, fail)
    with pytest.raises(RuntimeError, match="step on the host failed"):
        worker.drain()
    with pytest.raises(RuntimeError, match="step of this group failed") as caught:
        gate.wait()
    assert "illegal memory access" in str(caught.value.__cause__)
    worker.close()


def test_a_failed_task_opens_all_gates_with_its_error() -> None:
    worker = Worker(torch.device("cpu"), Timeline())
    gates = [Gate(), Gate()]

    def fail() -> None:
        raise OSError("no more")

    worker.submit(0, gates[0], fail)
    worker.submit(1, gates[1], lambda: pytest.fail("ran after a failure"))
    with pytest.raises(RuntimeError, match="step on the host failed"):
        worker.drain()
    for gate in gates:
        with pytest.raises(RuntimeError, match="step of this group failed"):
            gate.wait()
    worker.close()


ENDS_EARLY = """
import torch
from heavylift.offload.gates import Gate
from heavylift.offload.timeline import Timeline
from heavylift.offload.worker import Worker

begun, gate, worker = torch.zeros(1), Gate(), Worker(torch.device("cpu"), Timeline())


def task():
    a = torch.randn(1000, 1000)
    for step in range(100):
        a.copy_(a * 1.0001)
        begun.fill_(1)
    gate.open(None)
    print("whole", flush=True)


worker.submit(0, gate, task)
while not begun:
    pass
"""


def test_a_program_may_end_while_a_step_is_being_done() -> None:
    """Its interpreter would abort the process: exit code 134, after all was well."""
    done = subprocess.run([sys.executable, "-c", ENDS_EARLY], env=command_env(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")


def test_a_worker_that_nobody_owns_does_what_it_has_and_ends() -> None:
    worker = Worker(torch.device("cpu"), Timeline())
    thread = worker._thread
    gate, begun, go_on, done = Gate(), threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        assert go_on.wait(10)
        gate.open(None)

    def second() -> None:
        done.append(True)
        gate.open(None)

    worker.submit(0, gate, first)
    worker.submit(0, gate, second)
    assert begun.wait(10)
    del worker
    gc.collect()
    go_on.set()
    thread.join(10)
    assert not thread.is_alive() and done == [True]


def worker_threads() -> list[threading.Thread]:
    """Threads of optimizers in this process."""
    return [thread for thread in threading.enumerate() if thread.name == "heavylift-step"]


def dropped_engine_job(folder: Path, setup: Setup) -> tuple[bool, int]:
    """Steps and lets go of everything without close(): is the optimizer still there, are its threads?"""
    gc.collect()
    before = set(worker_threads())
    engine = build(folder, setup)
    for rows in STEPS:
        take_step(engine, rows, setup.accumulation)
    optimizer: weakref.ref[TieredAdamW] = weakref.ref(engine.optimizer)
    (new,) = set(worker_threads()) - before
    del engine
    # the thread may have a step to end, which holds the optimizer: only a collection after that lets go of it, and only
    # then does the thread learn that nothing more will come
    for _ in range(100):
        gc.collect()
        new.join(0.1)
        if not new.is_alive():
            break
    gc.collect()
    return optimizer() is not None, len(set(worker_threads()) - before)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(schedule="deferred", clip=0.05),
        Setup(schedule="speculative", clip=1e9),
        Setup(schedule="auto", accumulation=2),
    ],
    ids=["deferred", "speculative", "accumulation"],
)
def test_an_optimizer_that_was_not_closed_leaves_no_thread_and_no_states(setup: Setup, odd_llama: Path) -> None:
    assert run_on_ranks(2, dropped_engine_job, odd_llama, setup) == [(False, 0)] * 2
