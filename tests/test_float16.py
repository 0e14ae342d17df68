"""float16 parameters and gradients, and losses that are scaled: conversions, norm, clipping, step, overflow."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adamw_helpers import assert_same_bits, each_isa, needs_kernel, the_kernel, using_isa
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import loss_sum, make_steps, micro_batches
from ranks.pool import run_on_ranks
from ranks.schedules import local_tensors, same_bits, slow_down
from ranks.sharded import BETAS, Setup, build
from torch import nn

from heavylift.config.schema import Schedule, Tier
from heavylift.engine import Engine
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.pieces import Operation
from heavylift.offload.tensors import StepTensors

STEPS = make_steps(4, VOCAB)
KEEP = AdamWHyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_isa(request.param) as name:
        yield name


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("float16") / "odd", tied=False)


# ---- conversions --------------------------------------------------------------------------------------------------


def all_halves() -> torch.Tensor:
    """Every float16 there is [65536]."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)


@needs_kernel
@each_isa
def test_every_half_becomes_the_float_that_torch_makes_of_it(isa: str) -> None:
    halves = all_halves()
    with the_kernel().pool(1) as pool:
        total = torch.full((halves.numel(),), -0.0)  # -0.0 + x is x, also for both zeros
        the_kernel().accumulate_(pool, total, halves)
        assert_same_bits(total, halves.float(), "float of half")
        finite = halves[halves.isfinite()]
        exact = float(finite.double().square().sum())
        assert the_kernel().sum_squares(pool, finite) == pytest.approx(exact, rel=1e-14)
        assert not math.isfinite(the_kernel().sum_squares(pool, halves))


@needs_kernel
@each_isa
def test_floats_round_to_the_half_that_torch_rounds_to(isa: str) -> None:
    """Every half, every middle between two, their neighbours, and random bits: ties, denormals, overflow, NaN."""
    finite = all_halves().float()
    finite = finite[finite.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2  # exact: float32 has room for one more bit
    beyond = torch.tensor([65519.99, 65520.0, 65536.0, 1e30, math.inf, math.nan, 2.0**-25, 1e-45, 0.0, -0.0])
    near = torch.cat([finite, middles, beyond, -beyond])
    down, up = (torch.nextafter(near, torch.tensor(limit)) for limit in (-math.inf, math.inf))
    generator = torch.Generator().manual_seed(7)
    random = torch.randint(-(2**31), 2**31, (2**19,), generator=generator, dtype=torch.int64).int().view(torch.float32)
    floats = torch.cat([near, down, up, random])
    out, zeros = torch.empty(floats.numel(), dtype=torch.float16), [torch.zeros_like(floats) for _ in range(3)]
    with the_kernel().pool(2) as pool:
        the_kernel().adamw_step_(pool, StepTensors(floats.clone(), *zeros, out), KEEP)
    assert_same_bits(out, floats.half(), "half of float")
    assert out.isnan().sum() == floats.isnan().sum() > 1000


# ---- a scaled loss is the same step --------------------------------------------------------------------------------


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))


@dataclass
class Run:
    """What a few steps of the small model left behind."""

    norms: list[float]
    tensors: dict[str, torch.Tensor]
    early: bool
    """Whether any step was taken during backward."""


def run_small(options: TieredOptions, scale: float, num_micro: int = 1, stay: float = 0.0) -> Run:
    """Four steps with the loss times `scale`. `stay`: the scale of the first step alone, if not 0."""
    model, run = small_model(), Run([], {}, False)
    optimizer = TieredAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, options=options)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        now = stay if stay and step == 0 else scale
        optimizer.set_grad_scale(now)
        for _ in range(num_micro):
            x = torch.randn(6, 7, generator=generator)
            (model(x).square().mean() * now).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.norms.append(optimizer.grad_norm)
        run.early |= optimizer.last_schedule not in (Schedule.SYNCHRONOUS, Schedule.DEFERRED)
    optimizer.synchronize()
    run.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    for index, entry in optimizer.state_dict()["state"].items():
        run.tensors |= {f"{index}.{name}": t.clone() for name, t in entry.items()}
    optimizer.close()
    return run


PLACES = [TieredOptions(), TieredOptions(Tier.HOST), TieredOptions(Tier.HOST, 0.37)]


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("schedule", ["synchronous", "deferred", "auto"])
def test_a_power_of_two_changes_no_bit(schedule: str, clip: float) -> None:
    for place, num_micro in ((PLACES[0], 1), (PLACES[1], 3), (PLACES[2], 1), (PLACES[2], 3)):
        changed = replace(place, max_grad_norm=clip, accumulate=num_micro > 1)
        exact = run_small(changed, 1.0, num_micro)
        other = run_small(replace(changed, schedule=Schedule(schedule)), 2.0**12, num_micro, stay=2.0**7)
        assert other.norms == exact.norms
        assert clip != 0.05 or min(exact.norms) > clip
        assert [n for n in exact.tensors if not same_bits(exact.tensors[n], other.tensors[n])] == []


def test_another_scale_is_off_by_roundings() -> None:
    exact, other = (run_small(TieredOptions(Tier.HOST, max_grad_norm=0.05), scale) for scale in (1.0, 1000.0 / 3))
    assert other.norms == pytest.approx(exact.norms, rel=1e-6)
    for name, tensor in exact.tensors.items():
        torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    optimizer = TieredAdamW(small_model().parameters())
    with pytest.raises(ValueError, match="expected a positive finite number"):
        optimizer.set_grad_scale(scale)


# ---- schedules ----------------------------------------------------------------------------------------------------


def test_auto_is_deferred_while_gradients_are_scaled() -> None:
    """Without clipping `auto` otherwise steps in backward from the start."""
    options = TieredOptions(Tier.HOST, schedule=Schedule.AUTO)
    assert run_small(options, 1.0).early
    assert not run_small(options, 2.0).early
    assert run_small(options, 1.0, stay=8.0).early, "as before once the scale is 1 again"


@pytest.mark.parametrize("schedule", ["speculative", "immediate"])
def test_schedules_that_step_in_backward_refuse_a_scale(schedule: str) -> None:
    options = TieredOptions(Tier.HOST, schedule=Schedule(schedule))
    optimizer = TieredAdamW(small_model().parameters(), options=options)
    optimizer.set_grad_scale(1.0)
    with pytest.raises(ValueError, match=f"schedule {schedule} steps before it is known whether .* choose auto"):
        optimizer.set_grad_scale(2.0)
    optimizer.close()
    # where nothing is stepped in backward, there is nothing to refuse
    for other in (replace(options, accumulate=True), replace(options, tier=Tier.DEVICE)):
        optimizer = TieredAdamW(small_model().parameters(), options=other)
        optimizer.set_grad_scale(2.0)
        optimizer.close()


def test_a_scale_that_comes_after_a_step_in_backward_is_an_error() -> None:
    model = small_model()
    optimizer = TieredAdamW(model.parameters(), options=TieredOptions(Tier.HOST, schedule=Schedule.AUTO))
    model(torch.ones(2, 7)).sum().backward()
    optimizer.set_grad_scale(4.0)
    with pytest.raises(RuntimeError, match="its step was taken during backward with .*grad_scale=1.0"):
        optimizer.step()
    optimizer.close()


# ---- float16 models on ranks --------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Of a float16 run, on one rank."""

    norms: list[float]
    skipped: list[bool]
    tensors: dict[str, torch.Tensor]
    unchanged_by_skip: bool
    operations: dict[Operation, int]


def scaled_steps(engine: Engine, setup: Setup, scale: float, overflow_at: int = -1) -> Outcome:
    """Steps with a scaled loss; closes the optimizer. At `overflow_at` the gradients of the last rank overflow."""
    optimizer, outcome = engine.optimizer, Outcome([], [], {}, True, {})
    optimizer.set_grad_scale(scale)
    counts = slow_down(optimizer, 0.002)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step, rows in enumerate(STEPS):
        before = local_tensors(engine) if step == overflow_at else {}
        factor = 2.0**18 if step == overflow_at and rank == world - 1 else 1.0
        for index, batch in enumerate(micro_batches(rows, rank, world, setup.accumulation)):
            engine.sharded.set_last_micro_batch(index == setup.accumulation - 1)
            (loss_sum(engine.module, batch) / rows.num_trained * scale * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        outcome.norms.append(optimizer.grad_norm)
        outcome.skipped.append(optimizer.skipped)
        if step == overflow_at:
            after = local_tensors(engine)
            outcome.unchanged_by_skip = all(same_bits(before[n], after[n]) for n in before)
    outcome.tensors, outcome.operations = local_tensors(engine), dict(counts)
    optimizer.close()
    return outcome


def plain_half(folder: Path, setup: Setup, scale: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same on one process with torch.optim.AdamW on float32 masters: unscaled norms, and masters by name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=setup.lr, betas=BETAS, weight_decay=0.1, foreach=False)
    norms = []
    for rows in STEPS:
        (loss_sum(model, rows) / rows.num_trained * scale).backward()
        for name, param in model.named_parameters():
            masters[name].grad, param.grad = param.grad.float() / scale, None
        norms.append(float(nn.utils.clip_grad_norm_(masters.values(), setup.clip or math.inf, foreach=False)))
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
    return norms, {name: m.detach() for name, m in masters.items()}


def masters_job(folder: Path, setup: Setup, scale: float) -> tuple[list[float], list[bool], dict[str, torch.Tensor]]:
    """Norms, skips and whole masters by name. A collective."""
    engine = build(folder, replace(setup, dtype=torch.float16))
    outcome = scaled_steps(engine, setup, scale)
    masters = {}
    for index, (name, param) in enumerate(engine.module.named_parameters()):
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, outcome.tensors[f"{index}.master"])
        masters[name] = torch.cat(shards)[: param.shape[0]]
    return outcome.norms, outcome.skipped, masters


@pytest.mark.parametrize(
    ("world", "setup"),
    [
        (1, Setup(lr=1e-3)),
        (2, Setup(lr=1e-3, ratio=0.37, clip=0.05, schedule="auto")),
        (2, Setup(lr=1e-3, stage=1, tier="device", accumulation=2)),
        (2, Setup(lr=1e-3, stage=2, schedule="deferred", accumulation=4)),
    ],
    ids=["host", "part-auto-clip", "stage1-device-accumulation", "stage2-deferred-accumulation"],
)
def test_float16_follows_the_plain_loop(world: int, setup: Setup, odd_llama: Path) -> None:
    """The way that the masters go from the start is compared with the way of the plain loop's."""
    from transformers import AutoModelForCausalLM

    scale = 2.0**6
    plain_norms, plain = plain_half(odd_llama, setup, scale)
    norms, skipped, masters = run_on_ranks(world, masters_job, odd_llama, setup, scale)[0]
    assert not any(skipped)
    assert norms == pytest.approx(plain_norms, rel=5e-3)  # 11 bits: half of the rounding to float16 is 2.4e-4
    start = dict(AutoModelForCausalLM.from_pretrained(odd_llama, dtype=torch.float16).named_parameters())
    way = torch.cat([(plain[n] - start[n].detach().float()).flatten() for n in start])
    apart = torch.cat([(masters[n] - plain[n]).flatten() for n in start])
    assert float(apart.norm() / way.norm()) < 0.03, float(apart.norm() / way.norm())
    assert any(not torch.equal(m, m.half().float()) for m in masters.values()), "masters were rounded"


SCALED = 2.0**6


def schedules_job(folder: Path, setup: Setup, overflow_at: int) -> list[tuple[str, list[str], Outcome]]:
    """Every schedule and place beside the synchronous step with all states on the host: names of what differs."""
    half = replace(setup, dtype=torch.float16)
    reference = scaled_steps(build(folder, half), half, SCALED, overflow_at)
    found = []
    for schedule, ratio in (("synchronous", 0.37), ("deferred", 1.0), ("auto", 0.37), ("auto", 0.0)):
        other = scaled_steps(build(folder, replace(half, schedule=schedule, ratio=ratio)), half, SCALED, overflow_at)
        differ = [n for n, t in reference.tensors.items() if not same_bits(t, other.tensors[n])]
        other.tensors = {}
        found.append((f"{schedule}, ratio {ratio}", differ, other))
    return found


@pytest.mark.parametrize(
    ("world", "setup"),
    [(1, Setup(clip=0.05)), (2, Setup()), (2, Setup(clip=1e6, accumulation=2, stage=1))],
    ids=["1-clipped", "2", "2-stage1-accumulation"],
)
def test_an_overflow_leaves_every_bit_in_every_schedule(world: int, setup: Setup, odd_llama: Path) -> None:
    for rank in run_on_ranks(world, schedules_job, odd_llama, replace(setup, lr=1e-3), 2):
        for name, differ, outcome in rank:
            assert differ == [], name
            assert outcome.skipped == [False, False, True, False], name
            assert [math.isfinite(norm) for norm in outcome.norms] == [True, True, False, True], name
            assert outcome.unchanged_by_skip, name
            assert outcome.operations.keys() <= {Operation.STEP}, name


def test_auto_does_not_step_float16_in_backward_whatever_the_scale(odd_llama: Path) -> None:
    setup = Setup(schedule="auto", lr=1e-3)
    (early,) = run_on_ranks(1, speculates_job, odd_llama, setup, torch.float32)
    (half,) = run_on_ranks(1, speculates_job, odd_llama, setup, torch.float16)
    assert early and not half


def speculates_job(folder: Path, setup: Setup, dtype: torch.dtype) -> bool:
    engine = build(folder, replace(setup, dtype=dtype))
    (loss_sum(engine.module, STEPS[0]) / STEPS[0].num_trained).backward()
    engine.optimizer.step()
    engine.optimizer.close()
    return engine.optimizer.last_schedule is Schedule.SPECULATIVE


def test_an_optimizer_without_native_kernel_computes_the_same() -> None:
    """float16 parameters that nothing shards, on both kernels of the host."""
    torch.manual_seed(0)
    start = nn.Linear(9, 11)
    results: list[Any] = []
    for use_native in (False, True):
        model = copy.deepcopy(start).half()
        options = TieredOptions(Tier.HOST, 0.6, native=use_native, max_grad_norm=1e-3)
        optimizer = TieredAdamW(model.parameters(), lr=1e-2, options=options)
        optimizer.set_grad_scale(2.0**8)
        for step in range(3):
            x = torch.linspace(-1, 1, 4 * 9).view(4, 9).half() * (step + 1)
            (model(x).float().square().mean() * 2.0**8).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({n: p.detach().clone() for n, p in model.named_parameters()})
        for index, entry in optimizer.state_dict()["state"].items():
            results[-1] |= {f"{index}.{name}": t.clone() for name, t in entry.items()}
        optimizer.close()
    assert all(same_bits(results[0][n], results[1][n]) for n in results[0])
    assert results[0]["weight"].dtype == torch.float16
    assert not torch.equal(results[0]["weight"].float(), start.weight.half().float())
