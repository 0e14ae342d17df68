"""8-bit moments in an optimizer: blocks in groups that are cut; bytes; nothing but the blocks shows in a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adamw_helpers import assert_same_bits, coded, draw_state
from plans import GIB, llama_8b
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.schedules import Difference, Disturbance, compare, observe, run
from ranks.sharded import Setup, build, take_step
from torch import nn

from heavylift.config.schema import StateFormat, Tier
from heavylift.memory.fit import Setting, device_room, lowest_ratio
from heavylift.memory.machine import MachineMemory
from heavylift.offload.access import find_states
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.kernels import PlainKernel
from heavylift.offload.noise import noise_of
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.quantised import GRIDS, block_pieces, decode
from heavylift.offload.tensors import StepTensors

STEPS = make_steps(5, VOCAB)
HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=5)
PLAIN = PlainKernel()
INT8 = TieredOptions(state_format=StateFormat.INT8)


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("int8") / "odd", tied=False)


# ---- blocks in groups -----------------------------------------------------------------------------------------------


def test_segments_and_parts_begin_blocks_of_their_own() -> None:
    assert block_pieces((300, 5, 256), 0, 561) == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert block_pieces((300, 5, 256), 10, 302) == [slice(0, 2), slice(2, 3), slice(3, 3)]
    assert block_pieces((300, 5, 256), 303, 561) == [slice(0, 0), slice(0, 1), slice(1, 2)]
    assert block_pieces((), 0, 0) == []


SIZES = (300, 5, 1000, 256)


class Vectors(nn.Module):
    """Parameters of one group, some of which take no part in a step."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.vectors = nn.ParameterList(torch.randn(size, generator=generator) for size in SIZES)

    def set_grads(self, step: int) -> None:
        """Gradients of a step: the second vector has none in step 2, the third none in step 3."""
        generator = torch.Generator().manual_seed(step)
        for index, vector in enumerate(self.vectors):
            grad = torch.randn(vector.shape, generator=generator)
            vector.grad = None if (step, index) in ((2, 1), (3, 2)) else grad


@pytest.mark.parametrize("ratio", [0.0, 0.37, 0.83, 1.0])
def test_an_optimizer_steps_each_piece_as_if_it_were_alone(ratio: float) -> None:
    """Parameters without gradient, cuts inside of blocks and of parameters: each piece has its own blocks, its own
    steps and the noise of its place; nothing moves what lies beside."""
    model, expected = Vectors(), Vectors()
    optimizer = TieredAdamW(
        model.parameters(), lr=1e-2, weight_decay=0.1, options=replace(INT8, tier=Tier.HOST, ratio=ratio)
    )
    (group,), (parts,) = optimizer.groups, optimizer.parts
    pieces: dict[tuple[int, int], StepTensors] = {}
    counts = [0] * len(SIZES)
    for step in (1, 2, 3, 4):
        for module in (model, expected):
            module.set_grads(step)
        optimizer.step()
        for index, vector in enumerate(expected.vectors):
            if vector.grad is None:
                continue
            counts[index] += 1
            for part in parts:
                where = part.overlap(group.segments[index])
                if where is None:
                    continue
                inside = part.overlap_in_segment(group.segments[index])
                length = inside.stop - inside.start
                fresh = [vector.detach()[inside], torch.zeros(length), torch.zeros(length), vector.grad[inside]]
                piece = pieces.setdefault((index, inside.start), coded(fresh, torch.float32))
                noise = noise_of(f"param{index}", counts[index], inside.start)
                hyper = replace(HYPER, lr=1e-2, step=counts[index])
                PLAIN.step(replace(piece, grad=vector.grad[inside].clone(), noise=noise), hyper)
    assert len(pieces) == len(SIZES) + (0 < ratio < 1)
    for (index, start), piece in pieces.items():
        states = find_states(optimizer, model.vectors[index])
        assert states is not None and piece.scales is not None
        inside = slice(start, start + piece.master.numel())
        assert_same_bits(states.read("master")[inside], piece.master, f"master {index}")
        for name, scales in zip(GRIDS, piece.scales, strict=True):
            expected_moment = decode(piece.named()[name], scales, GRIDS[name])
            assert_same_bits(states.read(name)[inside], expected_moment, f"{name} {index}, {ratio=}")
    optimizer.close()


def test_moments_set_from_outside_are_rounded_to_nearest_and_leave_the_others_alone() -> None:
    model = Vectors()
    optimizer = TieredAdamW(model.parameters(), options=replace(INT8, tier=Tier.HOST, ratio=0.5))
    model.set_grads(1)
    optimizer.step()
    others = [find_states(optimizer, model.vectors[index]) for index in (1, 3)]
    before = [[states.read(name) for name in GRIDS] for states in others if states is not None]
    states = find_states(optimizer, model.vectors[2])
    assert states is not None
    values = draw_state(SIZES[2], torch.float32)[2]
    for name in GRIDS:
        states.write(name, values)
        got = states.read(name)
        assert (got - values).abs().max() <= values.max() / 32 and not torch.equal(got, values)
        states.write(name, got)
        assert_same_bits(states.read(name), got, f"{name} written again")
    after = [[states.read(name) for name in GRIDS] for states in others if states is not None]
    for old, new in zip(itertools.chain(*before), itertools.chain(*after), strict=True):
        assert_same_bits(new, old, "a neighbour")
    optimizer.close()


@pytest.mark.parametrize("accumulate", [False, True])
def test_ratio_auto_fills_the_device_to_the_element(accumulate: bool) -> None:
    """Though an element may begin a block."""
    planner, machine = llama_8b(2), MachineMemory(512 * GIB, 30 * GIB + 4321)
    setting = Setting(replace(INT8, tier=Tier.HOST, accumulate=accumulate), None)
    total = planner.shard_numel

    def room(on_device: int) -> int:
        options = replace(setting.options, ratio=(total - on_device) / total)
        return device_room(planner.plan(options, None), machine)

    on_device = total - round(lowest_ratio(planner, setting, machine) * total)
    assert 0 < on_device < total and room(on_device) >= 0 > room(on_device + 1)
    assert room(0) - room(on_device) == pytest.approx((6 + 8 / 256 + 4 * accumulate) * on_device, rel=1e-6)


# ---- runs -----------------------------------------------------------------------------------------------------------


def int8_job(folder: Path, setup: Setup) -> list[tuple[str, Difference, tuple[bool, ...]]]:
    """Schedules, kernels and tiers beside the synchronous step, where the blocks are the same."""
    disturbance = Disturbance(host_step_s=0.001, bad="late", at=2)
    found = []
    cut = replace(setup, ratio=0.37)
    for own, changed in (
        (setup, [replace(setup, schedule="deferred"), replace(setup, tier="device")]),
        (cut, [replace(cut, schedule="auto", native=False)]),
    ):
        reference = run(folder, own, STEPS, disturbance)
        for other in changed:
            outcome = run(folder, other, STEPS, disturbance)
            found.append((str(other), compare(outcome, reference), tuple(outcome.speculated)))
    return found


@pytest.mark.parametrize(
    ("world", "setup"),
    [
        (1, Setup(state_format="int8", dtype=torch.bfloat16, two_groups=True)),
        (2, Setup(state_format="int8", stage=2, clip=0.05)),
        (2, Setup(state_format="int8", dtype=torch.bfloat16, stage=3, accumulation=2)),
    ],
    ids=["1", "2-float32-clipped", "2-accumulated"],
)
def test_tier_schedule_and_kernel_do_not_show(world: int, setup: Setup, odd_llama: Path) -> None:
    for rank in run_on_ranks(world, int8_job, odd_llama, setup):
        for name, difference, speculated in rank:
            assert difference.tensors == () and not difference.losses, (name, difference)
            assert not any(speculated), "a step taken too early could not be taken back"


def resume_job(folder: Path, setup: Setup) -> list[str]:
    """Three steps, a state_dict into a new optimizer, two more; beside five steps in one go."""
    first = build(folder, setup)
    for rows in STEPS[:3]:
        take_step(first, rows)
    second = build(folder, replace(setup, schedule="deferred"))
    take_step(second, STEPS[4])
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    outcomes = [observe(engine, STEPS[3:5], 1, Disturbance()) for engine in (first, second)]
    return list(compare(*outcomes).tensors)


@pytest.mark.parametrize("setup", [Setup(dtype=torch.bfloat16), Setup(stage=2, ratio=0.4)], ids=["whole", "cut"])
def test_a_resumed_run_goes_on_to_the_bit(setup: Setup, odd_llama: Path) -> None:
    for different in run_on_ranks(2, resume_job, odd_llama, replace(setup, state_format="int8")):
        assert different == []


def moved_job(folder: Path) -> dict[str, float]:
    """Largest error of the moments that a state_dict brings to other places, over their largest value."""
    first = build(folder, Setup(ratio=0.5))
    for rows in STEPS[:3]:
        take_step(first, rows)
    second = build(folder, Setup(ratio=0.8, state_format="int8"))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    worst: dict[str, float] = {}
    for group in first.optimizer.groups:
        for segment in group.segments:
            for name in ("master", *GRIDS):
                pair = []
                for engine in (first, second):
                    param = dict(engine.module.named_parameters())[segment.name]
                    states = find_states(engine.optimizer, param)
                    assert states is not None
                    pair.append(states.read(name))
                largest = pair[0].abs().max().item() if pair[0].numel() else 0.0
                error = (pair[0] - pair[1]).abs().max().item() / largest if largest else 0.0
                worst[name] = max(worst.get(name, 0.0), error)
    for engine in (first, second):
        engine.optimizer.close()
    return worst


def test_states_of_another_format_and_layout_are_rounded_once(odd_llama: Path) -> None:
    for worst in run_on_ranks(2, moved_job, odd_llama):
        assert worst["master"] == 0
        assert 0 < worst["exp_avg"] <= 1 / 64 and 0 < worst["exp_avg_sq"] <= 1 / 64


@pytest.mark.soak
def test_the_recipe_key(write_recipe: Callable[..., Path], run_heavylift: Callable[..., Any], tmp_path: Path) -> None:
    """Two processes, either tier, either dtype: it trains, and the tier does not show."""
    for dtype in ("float32", "bfloat16"):
        losses = []
        for tier in ("host", "device"):
            output_dir = tmp_path / f"{dtype}-{tier}"
            recipe = write_recipe(
                model={"dtype": dtype},
                engine={"state_format": "int8", "offload_optimizer": tier},
                train={"output_dir": str(output_dir), "max_steps": 3, "learning_rate": 0.01},
                launch={"nproc": 2},
            )
            done = run_heavylift("train", recipe)
            assert done.rc == 0, done.stderr
            rows = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
            losses.append([row["loss"] for row in rows if "loss" in row])
        assert len(losses[0]) >= 3 and losses[0] == losses[1] and losses[0][-1] < losses[0][0]
