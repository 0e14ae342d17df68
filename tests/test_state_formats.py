"""State formats: what is stored is what the step would have had in float32, in every schedule, tier and checkpoint."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adamw_helpers import (
    SPECIALS,
    assert_same_bits,
    bits,
    draw_state,
    each_isa,
    needs_kernel,
    special_states,
    using_isa,
)
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.schedules import Difference, Disturbance, compare, observe, run, same_bits
from ranks.sharded import Setup, build, losses_job, take_step
from torch import Tensor, nn

from heavylift.config.schema import EngineConfig, Schedule, StateFormat, Tier
from heavylift.offload.access import find_states
from heavylift.offload.adamw import AdamWHyper, adamw_step_
from heavylift.offload.formats import join_masters, low_halves, mark_signs_, rounds_up
from heavylift.offload.kernels import Kernel, PlainKernel, host_kernel
from heavylift.offload.noise import noise_bits, noise_of, round_stochastically
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.pieces import Operation
from heavylift.offload.tensors import StepTensors

STEPS = make_steps(5, VOCAB)
BF16 = torch.bfloat16
HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=5)
SPLIT = TieredOptions(state_format=StateFormat.SPLIT)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_isa(request.param) as name:
        yield name


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("formats") / "odd", tied=False)


# ---- split masters are the masters ----------------------------------------------------------------------------------


def split(master: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter (bfloat16), low half (int16) and marked second moment of masters."""
    param, marked = master.bfloat16(), exp_avg_sq.clone()
    mark_signs_(marked, rounds_up(master, param))
    return param, low_halves(master), marked


def test_every_master_comes_back() -> None:
    """All high halves with the low halves around a tie and at both ends, and random ones: infinities, denormals, both
    zeros, carries into the exponent. A NaN comes back as a NaN."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    generator = torch.Generator().manual_seed(3)
    some = torch.randint(0, 2**16, (8,), generator=generator).tolist()
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *some):
        master = (high | low).view(torch.float32)
        moment = torch.rand(master.numel(), generator=generator)
        param, stored, marked = split(master, moment)
        assert_same_bits(join_masters(param, stored, marked), master, f"low half {low:#x}")
        assert_same_bits(marked.abs(), moment, "second moment")


def test_the_low_half_alone_would_not_do() -> None:
    """Two masters round to the same bfloat16 and have the same 16 bits below it: only the mark tells them apart."""
    lower = torch.tensor([0x3F818000], dtype=torch.int32).view(torch.float32)  # odd: the middle goes up to 0x3f82
    upper = torch.tensor([0x3F828000], dtype=torch.int32).view(torch.float32)  # even: the middle goes down to 0x3f82
    for x, up in ((lower, True), (upper, False)):
        assert bits(x.bfloat16()).item() == 0x3F82 and low_halves(x).item() == -0x8000
        assert bool(rounds_up(x, x.bfloat16())) is up


def as_split(state: list[Tensor]) -> tuple[StepTensors, StepTensors]:
    """Copies of a state (master, moments, gradient): as float32, and split."""
    master, exp_avg, exp_avg_sq, grad = (t.clone() for t in state)
    param, low, marked = split(master, exp_avg_sq)
    plain = StepTensors(master, exp_avg, exp_avg_sq, grad, param.clone())
    return plain, StepTensors(low, exp_avg.clone(), marked, grad.clone(), param, StateFormat.SPLIT)


def assert_same_states(stored: StepTensors, plain: StepTensors, what: str) -> None:
    assert stored.param_out is not None and plain.param_out is not None
    master = join_masters(stored.param_out, stored.master, stored.exp_avg_sq)
    assert_same_bits(master, plain.master, f"master, {what}")
    assert_same_bits(stored.exp_avg, plain.exp_avg, f"exp_avg, {what}")
    assert_same_bits(stored.exp_avg_sq.abs(), plain.exp_avg_sq, f"exp_avg_sq, {what}")
    assert_same_bits(stored.param_out, plain.param_out, f"param_out, {what}")


OPERATIONS: dict[str, Callable[[Kernel, StepTensors, AdamWHyper], None]] = {
    "step": lambda kernel, tensors, hyper: kernel.step(tensors, hyper),
    "correct": lambda kernel, tensors, hyper: kernel.correct(tensors, hyper, 0.3),
    "undo": lambda kernel, tensors, hyper: kernel.undo(tensors, hyper),
}
PLAIN = PlainKernel()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_twin_computes_what_it_does_in_float32(name: str) -> None:
    for grad_dtype, lr in itertools.product((torch.float32, torch.bfloat16), (1e-3, 0.0)):
        plain, stored = as_split(draw_state(30_001, grad_dtype))
        # what is corrected or taken back is a step
        for operation in (OPERATIONS["step"], OPERATIONS[name]):
            for tensors in (plain, stored):
                operation(PLAIN, tensors, replace(HYPER, lr=lr))
            assert_same_states(stored, plain, f"{name}, {lr=}")


@needs_kernel
@each_isa
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_kernel_computes_what_the_twin_does(name: str, isa: str) -> None:
    kernel = host_kernel(True, 2)
    for n, grad_dtype, lr in itertools.product((0, 1, 1023, 40_001), (torch.float32, torch.bfloat16), (1e-3, 0.0)):
        (_, expected), (_, got) = (as_split(draw_state(n, grad_dtype)) for _ in range(2))
        for computing, tensors in ((PLAIN, expected), (kernel, got)):
            computing.step(tensors, replace(HYPER, lr=lr))
            OPERATIONS[name](computing, tensors, replace(HYPER, lr=lr))
        assert torch.equal(got.master, expected.master), f"low halves, {n=}"
        for part in ("exp_avg", "exp_avg_sq", "param_out"):
            assert_same_bits(got.named()[part], expected.named()[part], f"{part}, {n=}")
    finite = tuple(x for x in SPECIALS if not math.isnan(x))
    plain, got = as_split(special_states(torch.bfloat16, finite))
    for computing, tensors in ((PLAIN, plain), (kernel, got)):
        computing.step(tensors, HYPER)
        OPERATIONS[name](computing, tensors, HYPER)
    assert_same_states(got, plain, "special values")
    kernel.close()


# ---- moments in bfloat16 --------------------------------------------------------------------------------------------


def test_stochastic_rounding_takes_a_neighbour_and_keeps_the_mean() -> None:
    """Over 2^16 draws: the mean is within five standard deviations; bfloat16 numbers stay; NaN and infinity too."""
    draws = 2**16
    bits_of_all = noise_bits(noise_of("weight", 3, 0), draws, torch.device("cpu"))
    for x in (1.0 + 2**-9, -3.1e-5, 7e30, 1e-39, -(1.0 + 2**-7 - 2**-20)):
        values = torch.full((draws,), x)
        rounded = round_stochastically(values, bits_of_all).double()
        below, above = rounded.min().item(), rounded.max().item()
        assert below < x < above and set(rounded.unique().tolist()) == {below, above}
        share = (values[0].double().item() - below) / (above - below)
        deviation = (above - below) * math.sqrt(share * (1 - share) / draws)
        assert abs(rounded.mean().item() - values[0].double().item()) < 5 * deviation
    kept = torch.tensor([0.0, -0.0, 1.0, -(2.0**-133), math.inf, -math.inf, math.nan, 3.3895e38]).bfloat16()
    ones = torch.full((kept.numel(),), 0xFFFF)
    assert_same_bits(round_stochastically(kept.float(), ones), kept, "bfloat16 numbers")


def test_noise_depends_on_parameter_step_and_element_and_nothing_else() -> None:
    cpu, n = torch.device("cpu"), 2**16
    noise = noise_of("a.weight", 7, 1000)
    whole = noise_bits(noise, n, cpu)
    assert torch.equal(noise_bits(noise.advanced(123), n - 123, cpu), whole[123:])
    assert int(whole.min()) >= 0 and int(whole.max()) < 2**32
    halves = torch.stack([whole & 0xFFFF, whole >> 16]).double()
    others = [noise_of("a.weight", 8, 1000), noise_of("b.weight", 7, 1000), noise_of("a.weight", 7, 1000 + n)]
    for other in others:
        halves = torch.cat([halves, (noise_bits(other, n, cpu) & 0xFFFF).double()[None]])
    # uniform from 0 to 65535, and uncorrelated: between both halves, steps, parameters, elements, and with the next
    assert (halves.mean(1) - 65535 / 2).abs().max() < 5 * 65536 / math.sqrt(12 * n)
    correlation = torch.corrcoef(torch.cat([halves, halves[:1].roll(1, 1)])) - torch.eye(6)
    assert correlation.abs().max() < 5 / math.sqrt(n), correlation


def rounded_state(state: list[Tensor], out_dtype: torch.dtype, first: int) -> StepTensors:
    master, exp_avg, exp_avg_sq, grad = (t.clone() for t in state)
    moments = exp_avg.bfloat16(), exp_avg_sq.bfloat16()
    out = torch.zeros(master.numel(), dtype=out_dtype)
    return StepTensors(master, *moments, grad, out, StateFormat.BF16, noise_of("weight", 5, first))


@needs_kernel
@each_isa
def test_the_kernel_rounds_moments_as_the_twin_does(isa: str) -> None:
    kernels = [PLAIN, host_kernel(True, 1), host_kernel(True, 3)]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for n, dtype, lr in itertools.product((0, 1, 1025, 70_001), dtypes, (1e-3, 0.0)):
        results = [rounded_state(draw_state(n, dtype), dtype, 2**32 - 500) for _ in kernels]
        for kernel, tensors in zip(kernels, results, strict=True):
            for _ in range(2):
                kernel.step(tensors, replace(HYPER, lr=lr))
        for other in results[1:]:
            for name, tensor in results[0].named().items():
                assert_same_bits(other.named()[name], tensor, f"{name}, {n=}, {dtype}")
    special = [rounded_state(special_states(torch.bfloat16), torch.bfloat16, 0) for _ in kernels]
    for kernel, tensors in zip(kernels, special, strict=True):
        kernel.step(tensors, HYPER)
    for name, tensor in special[0].named().items():
        assert_same_bits(special[2].named()[name], tensor, f"{name}, special values")
    for kernel in kernels:
        for name in ("correct", "undo"):
            with pytest.raises(AssertionError, match="cannot be taken back"):
                OPERATIONS[name](kernel, rounded_state(draw_state(8, torch.float32), torch.float32, 0), HYPER)
        kernel.close()


def test_a_second_moment_decays_on_average_and_would_stand_still_rounded_to_nearest() -> None:
    n, steps = 4096, 300
    grad, master = torch.zeros(n), torch.zeros(n)
    start = torch.linspace(1, 2, n).bfloat16()
    tensors = StepTensors(master, torch.zeros(n).bfloat16(), start.clone(), grad, None, StateFormat.BF16, None)
    nearest = start.clone()
    for step in range(1, steps + 1):
        adamw_step_(replace(tensors, noise=noise_of("weight", step, 0)), replace(HYPER, step=step))
        nearest = (nearest.float() * HYPER.beta2).bfloat16()
    expected = start.double().mean().item() * HYPER.beta2**steps
    assert tensors.exp_avg_sq.double().mean().item() == pytest.approx(expected, rel=5e-3)
    assert torch.equal(nearest, start)


def bf16_job(folder: Path, setup: Setup) -> list[tuple[str, Difference, tuple[bool, ...]]]:
    """bfloat16 moments: every schedule and division of the work beside the synchronous step with all on the host."""
    disturbance = Disturbance(host_step_s=0.001, bad="late", at=2)
    reference = run(folder, setup, STEPS, disturbance)
    found = []
    for change in (
        {"schedule": "deferred"},
        {"schedule": "auto", "ratio": 0.37, "native": False},
        {"tier": "device"},
    ):
        other = run(folder, replace(setup, **change), STEPS, disturbance)
        found.append((str(change), compare(other, reference), tuple(other.speculated)))
    return found


@pytest.mark.parametrize(
    ("world", "setup"),
    [
        (1, Setup(state_format="bf16", dtype=BF16, two_groups=True)),
        (2, Setup(state_format="bf16", stage=2, clip=0.05)),
        (2, Setup(state_format="bf16", dtype=BF16, stage=3, accumulation=2)),
    ],
    ids=["1", "2-float32-clipped", "2-accumulated"],
)
def test_bf16_moments_do_not_depend_on_tier_schedule_or_kernel(world: int, setup: Setup, odd_llama: Path) -> None:
    for rank in run_on_ranks(world, bf16_job, odd_llama, setup):
        for name, difference, speculated in rank:
            assert difference.tensors == () and not difference.losses, (name, difference)
            assert not any(speculated), "a step taken too early could not be taken back"


def elements_job(folder: Path) -> dict[str, tuple[int, int]]:
    """Of each parameter: index of this rank's first element in the whole, and how many it has."""
    engine = build(folder, Setup(stage=3))
    engine.optimizer.close()
    return {s.name: (s.first, s.numel) for group in engine.optimizer.groups for s in group.segments}


def test_an_element_has_its_number_on_any_number_of_ranks(odd_llama: Path) -> None:
    (whole,) = run_on_ranks(1, elements_job, odd_llama)
    ranks = run_on_ranks(2, elements_job, odd_llama)
    for name, (first, numel) in whole.items():
        assert first == 0
        (start, half), (second, rest) = (rank[name] for rank in ranks)
        assert start == 0 and (second == half or rest == 0) and half + rest == numel, name
    assert all(rank["model.embed_tokens.weight"][1] > 0 for rank in ranks)


OVERFIT = Setup(lr=3e-3, clip=1.0)
"""For 90 steps on three batches."""


@pytest.fixture(scope="module")
def exact_losses(odd_llama: Path) -> list[float]:
    """Of overfitting with float32 states."""
    (losses,) = run_on_ranks(1, losses_job, odd_llama, OVERFIT, STEPS[:3], 90)
    assert losses[-1] < 0.7 * losses[0]
    return losses


@pytest.mark.parametrize(("state_format", "bound"), [("bf16", 0.015), ("int8", 0.05)])
def test_rounded_moments_train_as_well(
    state_format: str, bound: float, exact_losses: list[float], odd_llama: Path
) -> None:
    """The losses end within a few percent of those with float32 states."""
    setup = replace(OVERFIT, state_format=state_format)
    (rounded,) = run_on_ranks(1, losses_job, odd_llama, setup, STEPS[:3], 90)
    assert sum(rounded[-6:]) == pytest.approx(sum(exact_losses[-6:]), rel=bound)
    assert rounded != exact_losses


@pytest.mark.parametrize("schedule", ["speculative", "immediate"])
@pytest.mark.parametrize("state_format", ["bf16", "int8"])
def test_rounded_moments_refuse_schedules_that_may_have_to_revise(state_format: str, schedule: str) -> None:
    options: dict[str, Any] = {"schedule": Schedule(schedule), "state_format": StateFormat(state_format)}
    said = f"schedule {schedule} has taken too early cannot be taken back"
    with pytest.raises(ValueError, match=f"with state format {state_format} a step that {said}"):
        TieredOptions(Tier.HOST, **options)
    said = f"{schedule} has taken too early cannot be taken back with state_format {state_format}"
    with pytest.raises(ValueError, match=said):
        EngineConfig(**options)


# ---- runs -----------------------------------------------------------------------------------------------------------

SETTINGS = [
    (1, Setup(dtype=BF16, clip=0.05), "late"),
    (2, Setup(dtype=BF16, stage=2, clip=1e6, two_groups=True, freeze=("model.layers.0.*",)), "late"),
    (2, Setup(dtype=BF16, stage=1, accumulation=4, clip=0.05), "all"),
]


def formats_job(folder: Path, setup: Setup, bad: str) -> list[tuple[str, Difference, dict[Operation, int]]]:
    """Split states beside float32 ones, schedule by schedule, on each tier and on both."""
    disturbance, found = Disturbance(host_step_s=0.001, bad=bad, at=2 if bad else -1), []
    places = [("synchronous", 1.0), ("deferred", 0.37), ("speculative", 1.0), ("speculative", 0.37), ("auto", 0.6)]
    for schedule, ratio in places[: 2 if setup.accumulation > 1 else None]:
        changed = replace(setup, schedule=schedule, ratio=ratio)
        exact = run(folder, changed, STEPS, disturbance)
        other = run(folder, replace(changed, state_format="split"), STEPS, disturbance)
        found.append((f"{schedule}, ratio {ratio}", compare(other, exact), dict(other.operations)))
    device = replace(setup, tier="device")
    pair = [run(folder, replace(device, state_format=name), STEPS, disturbance) for name in ("split", "fp32")]
    return [*found, ("device", compare(*pair), {})]


@pytest.mark.parametrize(("world", "setup", "bad"), SETTINGS, ids=["1-clipped", "2-calm", "2-accumulated"])
def test_split_equals_fp32_to_the_bit(world: int, setup: Setup, bad: str, odd_llama: Path) -> None:
    """Also where steps are corrected and taken back: the same arithmetic on the same values."""
    seen: set[Operation] = set()
    for rank in run_on_ranks(world, formats_job, odd_llama, setup, bad):
        for name, difference, done in rank:
            assert difference.tensors == () and not difference.losses and not difference.skipped, (name, difference)
            assert difference.norm == 0, name
            seen |= done.keys()
    if setup.accumulation == 1 and bad:
        assert Operation.UNDO in seen and (Operation.CORRECT in seen) == (setup.clip == 0.05)


def resume_job(folder: Path, formats: tuple[str, str]) -> list[str]:
    """Three steps, a state_dict into an optimizer of another format, two more; beside five steps in one go."""
    setup = Setup(dtype=BF16, ratio=0.5, state_format=formats[0])
    first = build(folder, setup)
    for rows in STEPS[:3]:
        take_step(first, rows)
    second = build(folder, replace(setup, ratio=0.8, schedule="deferred", state_format=formats[1]))
    take_step(second, STEPS[4])
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    outcomes = [observe(engine, STEPS[3:5], 1, Disturbance()) for engine in (first, second)]
    return list(compare(*outcomes).tensors)


ACROSS = [*itertools.product(("fp32", "split"), repeat=2), ("bf16", "bf16")]


@pytest.mark.parametrize("formats", ACROSS, ids="-to-".join)
def test_a_state_dict_knows_no_format(formats: tuple[str, str], odd_llama: Path) -> None:
    for different in run_on_ranks(2, resume_job, odd_llama, formats):
        assert different == []


# ---- what others write and read -------------------------------------------------------------------------------------


def small(options: TieredOptions) -> tuple[nn.Module, TieredAdamW]:
    torch.manual_seed(0)
    model = nn.Linear(33, 7).bfloat16()
    return model, TieredAdamW(model.parameters(), lr=1e-2, options=options)


def step(model: nn.Module, optimizer: TieredAdamW) -> None:
    model(torch.linspace(-1, 1, 2 * 33).view(2, 33).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("options", [SPLIT, replace(SPLIT, tier=Tier.HOST), replace(SPLIT, tier=Tier.HOST, ratio=0.4)])
def test_writes_from_outside_are_followed_as_in_fp32(options: TieredOptions) -> None:
    results = []
    for state_format in (StateFormat.FP32, StateFormat.SPLIT):
        model, optimizer = small(replace(options, state_format=state_format))
        step(model, optimizer)
        with torch.no_grad():
            model.weight[::2] += 0.25  # the low halves of the old masters must not survive
        step(model, optimizer)
        states = find_states(optimizer, model.weight)
        assert states is not None
        for name, value in (("master", 1 / 3), ("exp_avg", -1e-3), ("exp_avg_sq", 1e-5)):
            values = states.read(name)
            values[3:50] = value
            states.write(name, values)
            assert same_bits(states.read(name), values)
        changed = states.segment.shard().clone()
        changed[7] = 2.0
        kept = states.read("master")
        states.write_changed(changed)
        after = states.read("master")
        assert after[7] == 2.0 and kept[7] != 2.0
        after[7] = kept[7]
        assert same_bits(after, kept), "masters whose parameter did not change keep their low halves"
        step(model, optimizer)
        results.append({name: states.read(name) for name in ("master", "exp_avg", "exp_avg_sq")})
        results[-1]["weight"] = model.weight.detach().clone()
        optimizer.close()
    assert all(same_bits(results[0][name], results[1][name]) for name in results[0])
    assert not torch.equal(results[0]["master"], results[0]["weight"].float().flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_split_refuses_parameters_that_are_no_half_of_a_master(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"needs bfloat16 parameters.*got {str(dtype).removeprefix('torch.')}"):
        TieredAdamW(nn.Linear(3, 3).to(dtype).parameters(), options=SPLIT)


def test_split_states_step_in_backward_too() -> None:
    """`auto` is not kept from it: a step is taken back as exactly as in float32."""
    model, optimizer = small(replace(SPLIT, tier=Tier.HOST, schedule=Schedule.AUTO))
    step(model, optimizer)
    assert optimizer.last_schedule is Schedule.SPECULATIVE
    optimizer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 4097, 1_000_003])
def test_the_fused_kernel_on_split_states(numel: int) -> None:
    from heavylift.offload.fused_gpu import FusedGpuKernel

    (_, expected), (_, cpu) = (as_split(draw_state(numel, torch.bfloat16)) for _ in range(2))
    got = StepTensors(*(t.cuda() for t in cpu.named().values()), StateFormat.SPLIT)
    for _ in range(2):
        adamw_step_(expected, HYPER)
        FusedGpuKernel().step(got, HYPER)
    assert torch.equal(got.master.cpu(), expected.master)
    for name in ("exp_avg", "exp_avg_sq", "param_out"):
        assert_same_bits(got.named()[name].cpu(), expected.named()[name], name)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_the_recipe_key(write_recipe: Callable[..., Path], run_heavylift: Callable[..., Any], tmp_path: Path) -> None:
    """On a CPU the parameters are float32 by default: refused with what to do. In bfloat16 the losses are the same."""
    losses = []
    for state_format in ("fp32", "split"):
        output_dir = tmp_path / state_format
        recipe = write_recipe(
            model={"dtype": "bfloat16"},
            engine={"state_format": state_format, "offload_optimizer": "host", "ratio": 0.5},
            train={"output_dir": str(output_dir), "max_steps": 3, "learning_rate": 0.01},
        )
        done = run_heavylift("train", recipe)
        assert done.rc == 0, done.stderr
        lines = (output_dir / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss"] for row in map(json.loads, lines) if "loss" in row])
    assert len(losses[0]) >= 3 and losses[0] == losses[1]
    refused = run_heavylift("train", write_recipe(engine={"state_format": "split"}))
    assert refused.rc == 2
    (error,) = refused.errors
    assert "engine.state_format: state format split needs bfloat16 parameters" in error and "model.dtype" in error
