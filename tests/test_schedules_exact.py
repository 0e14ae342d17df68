"""Every schedule against the synchronous step with all states on the host, to the bit: losses, shards, masters,
moments, step counts. Workers are slow in most runs, so that a mistake of order shows without a GPU's streams too.

What cannot be equal to the bit, steps that were taken too early and then corrected or taken back, is held to its bound.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.schedules import (
    Difference,
    Disturbance,
    Outcome,
    compare,
    distances,
    observe,
    run,
    same_bits,
)
from ranks.sharded import Setup, build

from heavylift.offload.pieces import Operation

STEPS = make_steps(8, VOCAB)
BAD_STEP = 2
SLOW_S = 0.003
NORM_TOLERANCE = 1e-12
"""Relative: the parts' sums of squares are float64 and added in another order."""
ULP = 2.0**-24
TRAJECTORY_BOUNDS = {
    torch.float32: {"master": 2e-5, "exp_avg": 8e-5, "exp_avg_sq": 4e-4},
    torch.bfloat16: {"master": 3e-3, "exp_avg": 0.06, "exp_avg_sq": 0.06},
}
"""Relative L2 after eight steps at a learning rate of 0.01, seven of them clipped to about a hundredth: ten times what
was seen (2e-6, 8e-6, 4e-5; 3e-4, 6e-3, 6e-3). A master that rounds to another bfloat16 weight changes the gradients."""

FACTORS = {
    "world": (1, 2),
    "stage": (3, 1),
    "accumulation": (1, 4),
    "clip": (0.0, 1e6, 0.05),  # off; above every norm of these runs; below all of them
    "dtype": (torch.float32, torch.bfloat16),
    "bad": ("", "all", "late"),
    "freeze": ((), ("model.layers.0.*",)),
    "tied": (False, True),
    "two_groups": (False, True),
}
F32, BF16, NONE, LAYER = torch.float32, torch.bfloat16, (), ("model.layers.0.*",)
SETTINGS = [
    (1, 3, 1, 1e6, BF16, "", NONE, True, True),
    (1, 3, 4, 0.0, BF16, "late", LAYER, False, False),
    (1, 1, 1, 0.05, BF16, "late", LAYER, True, True),
    (1, 1, 4, 0.0, F32, "all", NONE, True, True),
    (2, 3, 4, 1e6, F32, "late", NONE, True, False),
    (2, 3, 1, 0.05, BF16, "all", LAYER, True, False),
    (2, 3, 1, 0.0, BF16, "", LAYER, False, False),
    (2, 1, 4, 0.05, F32, "", NONE, False, False),
    (2, 1, 1, 1e6, F32, "all", LAYER, False, True),
    # without accumulation steps are taken during backward: more of these
    (2, 3, 1, 1e6, F32, "late", NONE, False, True),
    (2, 1, 1, 0.0, F32, "", NONE, True, False),
    (1, 3, 1, 0.05, F32, "", NONE, False, False),
]
SCHEDULES = ("synchronous", "deferred", "immediate", "speculative", "auto")
# each schedule with all and with a part of the states on the host, with a slow worker and with a quick one
PLACES = ((1.0, SLOW_S), (0.37, SLOW_S), (1.0, 0.0))


@pytest.fixture(scope="session")
def odd_llamas(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of the tiny model, by whether its embeddings are tied."""
    root = tmp_path_factory.mktemp("schedules")
    return {tied: save_odd_llama(root / str(tied), tied) for tied in (False, True)}


def largest(tensors: dict[str, torch.Tensor]) -> float:
    """The largest master."""
    return max(float(t.abs().max()) for name, t in tensors.items() if name.endswith(".master") and t.numel())


@dataclass(frozen=True)
class Report:
    """One run beside the synchronous one, on one rank."""

    name: str
    taken_early: bool
    """Whether a step of it could be taken in backward and turn out to be wrong."""
    difference: Difference
    distance: dict[str, float]
    outcome: Outcome


def setting_job(folder: Path, setup: Setup, bad: str) -> tuple[Outcome, list[Report]]:
    """The synchronous run of a setting, and all others beside it."""
    disturbance = Disturbance(bad=bad, at=BAD_STEP if bad else -1)
    reference = run(folder, setup, STEPS, disturbance)
    reports = []
    # with accumulation all overlapped schedules are one and the same
    places = PLACES if setup.accumulation == 1 else PLACES[:2]
    for schedule, (ratio, host_step_s) in itertools.product(SCHEDULES, places):
        if schedule == "immediate" and setup.clip > 0 or (schedule, ratio) == ("synchronous", 1.0):
            continue
        changed = replace(setup, schedule=schedule, ratio=ratio)
        other = run(folder, changed, STEPS, replace(disturbance, host_step_s=host_step_s))
        early = schedule in ("immediate", "speculative") and setup.accumulation == 1
        wrong = early and (setup.clip == 0.05 or bad == "late")
        difference, distance = compare(other, reference), distances(other.tensors, reference.tensors)
        other.tensors = {}
        name = f"{schedule}, ratio {ratio}, {'slow' if host_step_s else 'quick'}"
        reports.append(Report(name, wrong, difference, distance, other))
    return reference, reports


def setup_of(setting: tuple) -> tuple[int, Setup, str, bool]:
    """World size, setup, kind of bad gradient and whether the embeddings are tied."""
    values = dict(zip(FACTORS, setting, strict=True))
    world, bad, tied = values.pop("world"), values.pop("bad"), values.pop("tied")
    return world, Setup(**values), bad, tied


def test_the_settings_hold_every_pair_of_factors() -> None:
    held = {
        ((a, x), (b, y))
        for setting in SETTINGS
        for (a, x), (b, y) in itertools.combinations(zip(FACTORS, setting, strict=True), 2)
    }
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            assert ((a, x), (b, y)) in held


@pytest.mark.parametrize(
    "setting", SETTINGS, ids=lambda s: "-".join(str(v).removeprefix("torch.") or "good" for v in s)
)
def test_equals_the_synchronous_step(setting: tuple, odd_llamas: dict[bool, Path]) -> None:
    world, setup, bad, tied = setup_of(setting)
    for reference, reports in run_on_ranks(world, setting_job, odd_llamas[tied], setup, bad):
        assert reference.skipped == [bool(bad) and step == BAD_STEP for step in range(len(STEPS))]
        finite = [norm for norm in reference.norms if math.isfinite(norm)]
        assert len(finite) == len(STEPS) - bool(bad)
        if setup.clip:
            assert (min(finite) > setup.clip) if setup.clip == 0.05 else (max(finite) < setup.clip)
        for report in reports:
            check_report(report, setup, bad)


def check_report(report: Report, setup: Setup, bad: str) -> None:
    difference, operations = report.difference, report.outcome.operations
    assert not difference.skipped, report.name
    if not report.taken_early:
        assert difference.tensors == () and not difference.losses, report
        assert difference.norm <= NORM_TOLERANCE, report
        assert operations.keys() == {Operation.STEP}, report
        return
    assert difference.tensors, "nothing was corrected or taken back, so nothing was tested"
    assert (setup.clip == 0.05) == (operations[Operation.CORRECT] > 0), report
    assert (bad == "late") == (operations[Operation.UNDO] > 0), report
    for kind, bound in TRAJECTORY_BOUNDS[setup.dtype].items():
        assert report.distance[kind] < bound, (kind, report)


def test_with_nothing_on_the_host_every_schedule_is_the_device_step(odd_llamas: dict[bool, Path]) -> None:
    for reference, reports in run_on_ranks(1, nothing_on_host_job, odd_llamas[False]):
        assert reference.operations == {} and reference.tensors
        assert reports == [((), False)] * 4


def nothing_on_host_job(folder: Path) -> tuple[Outcome, list[tuple[tuple[str, ...], bool]]]:
    """The device tier beside the host tier with ratio 0."""
    reference = run(folder, Setup(tier="device", clip=0.05), STEPS[:4])
    others = [
        compare(run(folder, Setup(ratio=0.0, clip=0.05, schedule=schedule), STEPS[:4]), reference)
        for schedule in ("synchronous", "deferred", "speculative", "auto")
    ]
    return reference, [(other.tensors, other.losses) for other in others]


# ---- one step that is corrected or taken back ---------------------------------------------------------------------


def one_wrong_step_job(folder: Path, schedule: str, bad: str, limit: float) -> dict:
    """The states before and after a step in which clipping strikes, or that must not be, and the operations in it."""
    setup = Setup(schedule=schedule, clip=limit, lr=1e-4, weight_decay=0.1)
    engine = build(folder, setup)
    before = observe(engine, STEPS[:BAD_STEP], 1, Disturbance(), close=False)
    after = observe(engine, STEPS[BAD_STEP : BAD_STEP + 1], 1, Disturbance(SLOW_S, bad, 0), close=False)
    engine.optimizer.close()
    return {"before": before.tensors, "after": after.tensors, "operations": after.operations, "norm": after.norms[0]}


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_that_must_not_be_is_taken_back_within_its_bound(world: int, odd_llamas: dict[bool, Path]) -> None:
    """docs/log.md: moments and masters return but for a few roundings."""
    for rank in run_on_ranks(world, one_wrong_step_job, odd_llamas[False], "speculative", "late", 1e6):
        assert rank["operations"][Operation.UNDO] >= 2 and not math.isfinite(rank["norm"])
        before, after = rank["before"], rank["after"]
        found = distances(after, before)
        assert found["exp_avg"] < 2e-7 and found["exp_avg_sq"] < 2e-7, found
        assert found["max_master"] <= 4 * ULP * largest(before), found
        assert all(same_bits(after[name], before[name]) for name in before if name.endswith("step"))


@pytest.mark.parametrize("world", [1, 2])
def test_a_clipped_step_is_corrected_within_its_bound(world: int, odd_llamas: dict[bool, Path]) -> None:
    """Against the same step taken with the norm known. All gradients are a thousand times as large as usual."""
    runs = [
        run_on_ranks(world, one_wrong_step_job, odd_llamas[False], schedule, "spike", 100.0)
        for schedule in ("synchronous", "speculative")
    ]
    for exact, corrected in zip(*runs, strict=True):
        assert exact["norm"] == pytest.approx(corrected["norm"], rel=NORM_TOLERANCE)
        coefficient = 100.0 / exact["norm"]
        assert 2.0**-7 < coefficient < 0.5
        assert corrected["operations"][Operation.CORRECT] >= 3
        assert {n for n in exact["before"] if not same_bits(exact["before"][n], corrected["before"][n])} == set()
        found = distances(corrected["after"], exact["after"])
        # a few roundings (2^-24) of the unclipped gradient's part, which is 1/coefficient (squared) times the clipped
        assert found["exp_avg"] < 4 * ULP / coefficient, found
        assert found["exp_avg_sq"] < 2 * ULP / coefficient**2, found
        assert found["max_master"] <= 4 * ULP * largest(exact["after"]) + 1e-4 * found["exp_avg_sq"], found
        assert found["master"] > 0, "the correction is exact: say so"


def test_gradients_that_are_clipped_hard_wait_for_the_norm(odd_llamas: dict[bool, Path]) -> None:
    """Where a group's own norm asks for a coefficient below 2^-7, nothing is taken early and all is exact."""
    runs = [
        run_on_ranks(1, one_wrong_step_job, odd_llamas[False], schedule, "spike", 1e-3)[0]
        for schedule in ("synchronous", "speculative")
    ]
    assert runs[1]["operations"].keys() == {Operation.STEP}
    assert all(same_bits(t, runs[1]["after"][name]) for name, t in runs[0]["after"].items())


# ---- the negative control -----------------------------------------------------------------------------------------


def ungated_job(folder: Path, setup: Setup, gated: bool) -> Difference:
    reference = run(folder, replace(setup, schedule="synchronous"), STEPS[:4])
    return compare(run(folder, setup, STEPS[:4], Disturbance(host_step_s=0.05, gated=gated)), reference)


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (2, 1)])
@pytest.mark.parametrize("schedule", ["deferred", "speculative"])
def test_without_gates_the_comparison_fails(schedule: str, world: int, stage: int, odd_llamas: dict) -> None:
    setup = Setup(stage=stage, schedule=schedule, clip=1e6)
    for found in run_on_ranks(world, ungated_job, odd_llamas[False], setup, True):
        assert found.tensors == () and not found.losses
    for found in run_on_ranks(world, ungated_job, odd_llamas[False], setup, False):
        assert found.losses and len(found.tensors) > 20, "stale weights were read, and nobody noticed"
