"""What a user may rely on while the step runs on another thread: whose learning rate counts, who waits for what, how
failures surface, what is left behind. The worker is slow in all of these, so that nothing is right by luck."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.branches import branches_job
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import loss_sum, make_steps, micro_batches
from ranks.pool import run_on_ranks
from ranks.schedules import Disturbance, compare, local_tensors, observe, run, same_bits, slow_down
from ranks.sharded import Setup, build, take_step
from torch import nn

from heavylift.config.schema import Schedule, Tier
from heavylift.errors import UserError
from heavylift.offload.groups import Group, make_group
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions

STEPS = make_steps(4, VOCAB)
SLOW = Disturbance(host_step_s=0.005)
OVERLAPPED = ("deferred", "immediate", "speculative", "auto")
each_schedule = pytest.mark.parametrize("schedule", OVERLAPPED)


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("semantics") / "odd", tied=False)


def setup(schedule: str, **more: Any) -> Setup:
    """Without clipping `auto` takes every step during backward; a limit above all norms keeps it deferred at first."""
    return Setup(schedule=schedule, clip=0.0 if schedule == "immediate" else 1e6, **more)


def backward(engine: Any, step: int) -> None:
    """The backward of a step, without the step."""
    rows = STEPS[step]
    mine = micro_batches(rows, torch.distributed.get_rank(), torch.distributed.get_world_size(), 1)[0]
    (loss_sum(engine.module, mine) / rows.num_trained).backward()


# ---- which hyperparameters count ----------------------------------------------------------------------------------


def scheduler_job(folder: Path, schedule: str) -> Any:
    """The learning rate falls to a third right after every step(), while the step is still running."""
    outcomes = []
    for name in ("synchronous", schedule):
        engine = build(folder, setup(name, two_groups=True))
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 3.0**-step)
        outcomes.append(observe(engine, STEPS, 1, SLOW, lambda _, scheduler=scheduler: scheduler.step()))
    return compare(*outcomes)


@each_schedule
def test_a_scheduler_stepped_while_the_step_runs_does_not_reach_it(schedule: str, odd_llama: Path) -> None:
    difference = run_on_ranks(1, scheduler_job, odd_llama, schedule)[0]
    assert difference.tensors == () and not difference.losses


def late_lr_job(folder: Path, schedule: str) -> Any:
    """A new learning rate between backward and step()."""
    tensors = []
    for name in ("synchronous", schedule):
        engine = build(folder, setup(name))
        slow_down(engine.optimizer, 0.005)
        try:
            for step in range(2):
                backward(engine, step)
                engine.optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            tensors.append(local_tensors(engine))
        finally:
            engine.optimizer.close()
    return [name for name in tensors[0] if not same_bits(tensors[0][name], tensors[1][name])]


def test_a_deferred_step_takes_the_learning_rate_of_step(odd_llama: Path) -> None:
    assert run_on_ranks(1, late_lr_job, odd_llama, "deferred") == [[]]


@pytest.mark.parametrize("schedule", ["immediate", "speculative"])
def test_a_step_taken_in_backward_refuses_a_later_learning_rate(schedule: str, odd_llama: Path) -> None:
    (message,) = run_on_ranks(1, error_of_job, late_lr_job, odd_llama, schedule)
    assert re.search(r"weight: its step was taken during backward with .*lr=0.01,.* asks for .*lr=0.001,", message)


def grouped(name: str, **params: nn.Parameter) -> Group:
    group = make_group(name, params.items())
    assert group is not None
    return group


@pytest.mark.parametrize("schedule", ["immediate", "speculative"])
def test_with_the_old_learning_rate_back_the_step_can_be_finished(schedule: str) -> None:
    """Also where a group is ready in step() only, as one of its parameters has no gradient."""
    runs = []
    for name in ("synchronous", schedule):
        early, late, unused = (nn.Parameter(torch.full((5,), float(i + 1))) for i in range(3))
        groups = [grouped("early", early=early), grouped("late", late=late, unused=unused)]
        options = TieredOptions(Tier.HOST, schedule=Schedule(name))
        optimizer = TieredAdamW([early, late, unused], lr=1e-2, groups=groups, options=options)
        for step in range(3):
            (early.square().sum() + (late - step).square().sum()).backward()
            if step == 1 and name != "synchronous":
                optimizer.param_groups[0]["lr"] = 1.0
                with pytest.raises(RuntimeError, match="early: its step was taken during backward"):
                    optimizer.step()
                optimizer.param_groups[0]["lr"] = 1e-2
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        runs.append([p.detach().clone() for p in (early, late, unused)])
        optimizer.close()
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    assert same_bits(runs[0][2], torch.full((5,), 3.0))


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_a_parameter_that_thaws_is_not_left_untrained_in_silence(tier: Tier) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = TieredAdamW(model.parameters(), lr=1e-2, options=TieredOptions(tier))
    before = copy.deepcopy(model.state_dict())
    model[0].weight.requires_grad_(True)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UserError, match=r"group 0: a parameter of shape \(2, 3\) was frozen .* is trainable now"):
        optimizer.step()
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)  # the other way round is fine
    optimizer.step()
    optimizer.close()


def error_of_job(job: Callable[..., Any], *args: Any) -> str:
    """The message of the RuntimeError that a job must raise."""
    with pytest.raises(RuntimeError) as caught:
        job(*args)
    return str(caught.value)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@each_schedule
def test_lr_0_leaves_every_weight_bit_equal(schedule: str, clip: float, odd_llama: Path) -> None:
    if schedule == "immediate" and clip:
        pytest.skip("immediate knows no clipping")
    changed = Setup(schedule=schedule, clip=clip, lr=0.0, ratio=0.8, dtype=torch.bfloat16)
    before, after = run_on_ranks(1, before_and_after_job, odd_llama, changed)[0]
    weights = [name for name in before if name in after and not name.endswith(("master", "exp_avg", "exp_avg_sq"))]
    assert len(weights) > 10 and all(same_bits(before[name], after[name]) for name in weights)
    moments = [t for name, t in after.items() if name.endswith("exp_avg")]
    assert all(bool(m.any()) for m in moments), "the steps were taken"


def before_and_after_job(folder: Path, changed: Setup) -> Any:
    engine = build(folder, changed)
    before = local_tensors(engine)
    return before, observe(engine, STEPS, 1, Disturbance(0.002, "late", 2)).tensors


# ---- which parameters count ---------------------------------------------------------------------------------------


def test_ranks_with_empty_shards(odd_llama: Path) -> None:
    """On four ranks the last one holds nothing of a norm, and of the key head only two hold anything."""
    for differences in run_on_ranks(4, all_schedules_job, odd_llama):
        for name, difference in differences.items():
            assert difference.tensors == () and not difference.losses, name


def all_schedules_job(folder: Path) -> Any:
    reference = run(folder, setup("synchronous"), STEPS[:3])
    return {name: compare(run(folder, setup(name), STEPS[:3], SLOW), reference) for name in OVERLAPPED}


@pytest.mark.parametrize("accumulate", [False, True])
@each_schedule
def test_parameters_that_are_not_used_take_no_step(schedule: str, accumulate: bool) -> None:
    expected, got = (run_on_ranks(2, branches_job, name, accumulate) for name in ("synchronous", schedule))
    for a, b in zip(expected, got, strict=True):
        assert [name for name in a if not same_bits(a[name], b[name])] == []
        assert {float(t) for name, t in b.items() if name.endswith("step")} == {2.0, 3.0, 4.0, 6.0}


@each_schedule
def test_parameters_without_fsdp2(schedule: str) -> None:
    """No module gathers them, so nothing but step() itself can wait. bfloat16: a master read anew would be rounded."""
    plain = [nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(i)).bfloat16()) for i in range(3)]
    for ratio in (1.0, 0.4, 1e-9):  # the last leaves nothing on the host
        runs = []
        for name in ("synchronous", schedule):
            params = copy.deepcopy(plain)
            optimizer = TieredAdamW(
                params, lr=1e-3, options=TieredOptions(Tier.HOST, ratio=ratio, schedule=Schedule(name))
            )
            slow_down(optimizer, 0.003)
            for step in range(4):
                loss = sum((p.float() - step).square().sum() for p in params)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            states = optimizer.state_dict()["state"]
            runs.append([p.detach().clone() for p in params] + [t.clone() for s in states.values() for t in s.values()])
            optimizer.close()
        assert all(same_bits(a, b) for a, b in zip(*runs, strict=True)), ratio


# ---- what is refused, and how failures surface --------------------------------------------------------------------


def second_backward_job(folder: Path, schedule: str) -> str:
    engine = build(folder, setup(schedule))
    backward(engine, 0)
    try:
        backward(engine, 1)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.optimizer.close()
    return "no error"


@each_schedule
def test_a_second_backward_before_step_needs_accumulation(schedule: str, odd_llama: Path) -> None:
    (message,) = run_on_ranks(1, second_backward_job, odd_llama, schedule)
    assert "a second gradient before step(): several backward passes per step need" in message
    assert "accumulate=True" in message


def failing_worker_job(folder: Path, changed: Setup, fails_at: int, reader: str) -> dict[str, Any]:
    """A step of a host part raises in the first training step. Who notices?"""
    engine = build(folder, changed)
    optimizer, calls = engine.optimizer, []

    def fail(*_: Any, **__: Any) -> None:
        calls.append(threading.current_thread().name)
        if len(calls) > fails_at:
            raise ZeroDivisionError("the kernel is broken")

    step_host_part = optimizer._stepper.step_host_part
    optimizer._stepper.step_host_part = lambda *a, **k: (fail(), step_host_part(*a, **k))
    error: BaseException | None = None
    readers: dict[str, Callable[[], Any]] = {
        "step": lambda: take_step(engine, STEPS[1], changed.accumulation),
        "state_dict": optimizer.state_dict,
        "last_group": optimizer.groups[-1].gate.wait,
        "first_group": optimizer.groups[0].gate.wait,
    }
    try:
        take_step(engine, STEPS[0], changed.accumulation)
        readers[reader]()
    except RuntimeError as caught:
        error = caught
    optimizer.close()
    alive = [t.name for t in threading.enumerate() if t.name == "heavylift-step"]
    return {"error": repr(error), "cause": repr(error and error.__cause__), "ran_on": set(calls), "alive": alive}


@pytest.mark.parametrize("reader", ["step", "state_dict", "first_group", "last_group"])
@pytest.mark.parametrize("fails_at", [0, 2])
@pytest.mark.parametrize(
    "changed",
    [setup("deferred"), setup("speculative"), setup("immediate"), setup("deferred", accumulation=2)],
    ids=["deferred", "speculative", "immediate", "accumulation"],
)
def test_an_error_on_the_worker_reaches_whoever_comes_next(
    changed: Setup, fails_at: int, reader: str, odd_llama: Path
) -> None:
    reads_one_group = reader in ("first_group", "last_group")
    # steps taken in backward come in its order, but what is left at step() is done in forward order: which groups were
    # done before the one that failed depends on how far the worker had come
    order_known = changed.schedule not in ("speculative", "immediate")
    if fails_at and reads_one_group and (reader == "first_group" or not order_known):
        pytest.skip("this group's step may have been done")
    (found,) = run_on_ranks(1, failing_worker_job, odd_llama, changed, fails_at, reader, timeout_s=60)
    assert "RuntimeError('the optimizer step" in found["error"]
    assert found["cause"] == "ZeroDivisionError('the kernel is broken')"
    assert found["ran_on"] == {"heavylift-step"} and found["alive"] == []


def no_backward_job(folder: Path, schedule: str) -> Any:
    engine = build(folder, setup(schedule))
    take_step(engine, STEPS[0])
    before = local_tensors(engine)
    engine.optimizer.step()
    after = local_tensors(engine)
    changed = [name for name in before if not same_bits(before[name], after[name])]
    engine.optimizer.close()
    try:
        engine.optimizer.step()
    except RuntimeError as error:
        return changed, engine.optimizer.grad_norm, str(error)
    return changed, engine.optimizer.grad_norm, "no error"


@pytest.mark.parametrize("schedule", ["synchronous", *OVERLAPPED])
def test_a_step_without_gradients_and_a_step_after_the_end(schedule: str, odd_llama: Path) -> None:
    assert run_on_ranks(1, no_backward_job, odd_llama, schedule) == [([], 0.0, "this optimizer is closed")]
