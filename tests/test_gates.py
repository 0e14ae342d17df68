"""Gates: a group's readers wait for its updated shard; and what else waits for a step under way, or outlives it."""

from __future__ import annotations

import gc
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.memory import status_bytes
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps, micro_batches
from ranks.pool import run_on_fresh_ranks, run_on_ranks
from ranks.schedules import local_tensors, same_bits, slow_down, without_gates
from ranks.sharded import Setup, build, take_step
from torch import nn

from heavylift.config.schema import Schedule, Tier
from heavylift.offload.gates import Gate, install_gate
from heavylift.offload.groups import local_tensor
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions

STEPS = make_steps(3, VOCAB)
SLOW_S = 0.03
OVERLAPPED = ("deferred", "immediate", "speculative", "auto")
each_schedule = pytest.mark.parametrize("schedule", OVERLAPPED)


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("gates") / "odd", tied=False)


def setup(schedule: str, **more: Any) -> Setup:
    return Setup(schedule=schedule, clip=0.0 if schedule == "immediate" else 1e6, **more)


# ---- one gate -----------------------------------------------------------------------------------------------------


class Reader(threading.Thread):
    """Waits at a gate on another thread."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(daemon=True)
        self.gate = gate
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.gate.wait()
        except BaseException as error:
            self.error = error

    def passes(self) -> bool:
        """Whether it comes through: at once when the gate is open, else never."""
        self.join(timeout=5)
        return not self.is_alive()


def test_an_open_gate_lets_through_and_settles_nothing() -> None:
    settled: list[int] = []
    gate = Gate(lambda: settled.append(1))
    gate.wait()
    assert settled == [] and gate.waited_s == 0


def test_a_closed_gate_blocks_until_every_update_is_done() -> None:
    settled: list[str] = []
    gate = Gate(lambda: settled.append(threading.current_thread().name))
    gate.close()
    gate.close()
    readers = [Reader(gate), Reader(gate)]
    gate.open(None)
    time.sleep(0.05)
    assert all(reader.is_alive() for reader in readers) and settled == []
    gate.open(None)
    assert all(reader.passes() for reader in readers)
    gate.wait()
    assert set(settled) <= {reader.name for reader in readers} and settled, "settled by a reader, after the last update"
    assert gate.waited_s > 0.04


def test_an_error_is_raised_by_every_reader() -> None:
    gate = Gate()
    gate.close()
    reader = Reader(gate)
    gate.open(None, ZeroDivisionError("broken"))
    assert reader.passes()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the optimizer step of this group failed") as caught:
            gate.wait()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert isinstance(reader.error, RuntimeError)


def test_opening_an_open_gate_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="nobody had closed"):
        Gate().open(None)


@pytest.mark.parametrize("compiled", ["never", "before", "after"])
def test_at_one_shard_the_gate_stands_before_the_module(compiled: str) -> None:
    seen: list[bool] = []
    module, gate = nn.Linear(3, 3), Gate(lambda: seen.append(True))
    module.register_forward_pre_hook(lambda *_: seen.append(False))
    if compiled == "before":
        module.compile(backend="eager")
    install_gate(module, gate, 1)
    if compiled == "after":
        module.compile(backend="eager")
    for _ in range(2):
        seen.clear()
        gate.close()
        gate.open(None)
        module(torch.ones(2, 3))
        assert seen[0] is True and False in seen, "the gate comes before other hooks, and before what is compiled"


def test_a_module_that_is_compiled_later_waits_every_time() -> None:
    """Without graph breaks: nothing of the gates, of which two optimizers have installed one each, is traced."""
    module, gates, seen = nn.Linear(3, 3), [Gate(), Gate()], []
    for index, gate in enumerate(gates):
        gate._on_settled = partial(seen.append, index)
        install_gate(module, gate, 1)
    module.compile(backend="eager", fullgraph=True)
    for _ in range(3):
        for gate in gates:
            gate.close()
            gate.open(None)
        module(torch.ones(2, 3))
    assert sorted(seen) == [0, 0, 0, 1, 1, 1]


def test_over_several_shards_a_gate_needs_a_sharded_module() -> None:
    with pytest.raises(AssertionError, match="is not under fully_shard"):
        install_gate(nn.Linear(3, 3), Gate(), 2)


# ---- who waits ----------------------------------------------------------------------------------------------------


def readers_job(folder: Path, changed: Setup, root: Path) -> dict[str, Any]:
    """After step() has returned, with the worker still at work: states, an evaluation, an export."""
    from safetensors.torch import load_file

    from heavylift.checkpoint.huggingface import save_model
    from heavylift.models.load import load_hf_config

    found: dict[str, Any] = {}
    for name in ("synchronous", changed.schedule):
        for reader in ("state_dict", "evaluate", "export"):
            engine = build(folder, Setup(**{**vars(changed), "schedule": name}))
            slow_down(engine.optimizer, SLOW_S)
            take_step(engine, STEPS[0])
            overlap = engine.optimizer._overlap
            pending = overlap is not None and overlap.worker.num_pending
            if reader == "state_dict":
                state = engine.optimizer.state_dict()["state"]
                result = {f"{i}.{n}": local_tensor(t).clone() for i, entry in state.items() for n, t in entry.items()}
            elif reader == "evaluate":
                batches = [micro_batches(STEPS[1], dist.get_rank(), dist.get_world_size(), 1)[0]]
                result = {"loss": torch.tensor(engine.evaluate(batches, STEPS[1].num_trained))}
            else:
                engine.optimizer.synchronize()
                where = root / name
                config = load_hf_config(folder, False)
                save_model(
                    engine.module, where, hf_config=config, tokenizer=None, dtype="float32", max_shard_bytes=10**9
                )
                result = load_file(where / "model.safetensors")
            found[f"{reader} {name}"] = result
            found[f"pending {reader} {name}"] = pending
            engine.optimizer.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
@each_schedule
def test_readers_right_after_step_see_the_whole_step(
    schedule: str, world: int, odd_llama: Path, tmp_path: Path
) -> None:
    for found in run_on_ranks(world, readers_job, odd_llama, setup(schedule, ratio=0.8), tmp_path):
        for reader in ("state_dict", "evaluate", "export"):
            expected, got = found[f"{reader} synchronous"], found[f"{reader} {schedule}"]
            assert found[f"pending {reader} {schedule}"], "the step was over already: nothing was tested"
            assert expected.keys() == got.keys() and len(expected) > 0
            assert [name for name in expected if not same_bits(expected[name], got[name])] == [], reader


def unshard_job(folder: Path, stage: int) -> list[float]:
    """Losses after a step, every group gathered by name before: with the worker idle, and with it still at work."""
    losses = []
    for name in ("synchronous", "deferred"):
        engine = build(folder, setup(name, ratio=0.8, stage=stage))
        slow_down(engine.optimizer, SLOW_S)
        take_step(engine, STEPS[0])
        for group in engine.sharded.groups:
            group.module.unshard()
        batch = [micro_batches(STEPS[1], dist.get_rank(), dist.get_world_size(), 1)[0]]
        losses.append(engine.evaluate(batch, STEPS[1].num_trained))
        engine.optimizer.close()
    return losses


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 3)])
def test_unshard_by_name_waits_too(world: int, stage: int, odd_llama: Path) -> None:
    for synchronous, deferred in run_on_ranks(world, unshard_job, odd_llama, stage):
        assert synchronous == deferred


def foreign_write_job(folder: Path, schedule: str) -> list[str]:
    """Weights halved after `synchronize`, with a step just begun; then another step."""
    runs = []
    for name in ("synchronous", schedule):
        engine = build(folder, setup(name))
        slow_down(engine.optimizer, SLOW_S)
        take_step(engine, STEPS[0])
        engine.optimizer.synchronize()
        with torch.no_grad():
            for param in engine.module.parameters():
                param.mul_(0.5)
        take_step(engine, STEPS[1])
        runs.append(local_tensors(engine))
        engine.optimizer.close()
    return [name for name in runs[0] if not same_bits(runs[0][name], runs[1][name])]


@each_schedule
def test_masters_follow_weights_written_after_synchronize(schedule: str, odd_llama: Path) -> None:
    assert run_on_ranks(2, foreign_write_job, odd_llama, schedule) == [[], []]


def stale_read_job(folder: Path, schedule: str) -> list[bool]:
    """Whether an evaluation right after step() sees the step: with gates, and without."""
    answers = []
    for gated in (True, False):
        if gated:
            engine = build(folder, setup(schedule))
        else:
            with without_gates():
                engine = build(folder, setup(schedule))
        batch = [micro_batches(STEPS[0], dist.get_rank(), dist.get_world_size(), 1)[0]]
        before = engine.evaluate(batch, STEPS[0].num_trained)
        slow_down(engine.optimizer, 0.2)
        take_step(engine, STEPS[0])
        answers.append(engine.evaluate(batch, STEPS[0].num_trained) != before)
        engine.optimizer.close()
    return answers


@pytest.mark.parametrize("world", [1, 2])
def test_without_gates_an_evaluation_sees_the_weights_of_before(world: int, odd_llama: Path) -> None:
    assert run_on_ranks(world, stale_read_job, odd_llama, "deferred") == [[True, False]] * world


# ---- what is left behind ------------------------------------------------------------------------------------------


def num_threads() -> int:
    """Threads of this process, those of the native kernel included."""
    return len(list(Path("/proc/self/task").iterdir()))


def many_optimizers_job(schedule: str, accumulate: bool) -> dict[str, Any]:
    """Twenty optimizers, one after the other, of the same 1.5 million parameters."""
    # far from 0: a value that comes to be exactly 0 has no gradient any more
    params = [nn.Parameter(torch.rand(500_000) + 1) for _ in range(3)]
    options = TieredOptions(Tier.HOST, schedule=Schedule(schedule), accumulate=accumulate, num_threads=2)
    threads, resident, moved = [], [], []
    for _ in range(20):
        optimizer = TieredAdamW(params, lr=1e-3, options=options)
        for _ in range(2):
            sum(p.square().sum() for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = params[0].detach().clone()
        sum(p.square().sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(bool((params[0] != before).all()))
        optimizer.close()
        optimizer.close()
        del optimizer
        gc.collect()
        threads.append(num_threads())
        resident.append(status_bytes("RssAnon"))
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in params]
    return {"threads": threads, "grown": resident[-1] - resident[2], "moved": moved, "hooks": hooks}


@pytest.mark.parametrize(
    ("schedule", "accumulate"),
    [
        ("deferred", False),
        ("speculative", True),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (("synchronous", False), ("synchronous", True))),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (("deferred", True), ("speculative", False))),
    ],
)
def test_twenty_optimizers_leave_nothing_behind(schedule: str, accumulate: bool) -> None:
    (found,) = run_on_ranks(1, many_optimizers_job, schedule, accumulate)
    assert found["threads"][-1] == found["threads"][0]
    # states, accumulators and kept gradients of one: 24 MB and more; of seventeen: 400. The process itself breathes by
    # 20 MB
    assert found["grown"] < 72e6
    assert all(found["moved"]), "an optimizer made of parameters that another one had did not step"
    assert found["hooks"] == [0, 0, 0]


def long_run_job(folder: Path, changed: Setup, num_steps: int) -> list[int]:
    """Resident bytes of the process's own memory after every twentieth part of the steps."""
    engine = build(folder, changed)
    steps = make_steps(10, VOCAB)
    resident = []
    for step in range(num_steps):
        take_step(engine, steps[step % len(steps)], changed.accumulation)
        engine.optimizer.timeline.take()  # as the training loop does; nobody's ranges are kept up to a limit
        if (step + 1) % (num_steps // 20) == 0:
            gc.collect()
            resident.append(status_bytes("RssAnon"))
    engine.optimizer.close()
    return resident


@pytest.mark.parametrize(
    ("changed", "num_steps"),
    [
        pytest.param(setup("speculative"), 100, id="spec"),
        pytest.param(setup("speculative"), 200, id="spec_long", marks=pytest.mark.soak),
        pytest.param(setup("deferred"), 200, id="deferred", marks=pytest.mark.soak),
        pytest.param(setup("auto", accumulation=2), 200, id="auto", marks=pytest.mark.soak),
    ],
)
def test_memory_is_flat_over_many_steps(changed: Setup, num_steps: int, odd_llama: Path) -> None:
    (resident,) = run_on_fresh_ranks(1, long_run_job, odd_llama, changed, num_steps)
    # anything kept of every step: gradients of 4 k parameters alone would be 16 kB a step, over the second half 1.6
    # times this
    assert resident[-1] - resident[9] < 5_000 * num_steps, resident
