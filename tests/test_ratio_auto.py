"""`engine.ratio: auto` fills the device to the element; what a plan that does not fit is told would fit; keys of the
host tier without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import Finished
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import GIB, ShapePlanner, llama_8b
from ranks.pool import run_on_ranks

from heavylift.config.recipe import load_recipe
from heavylift.config.schema import Recipe, Schedule, StateFormat, Tier
from heavylift.engine import build_optimizer, parameter_groups
from heavylift.errors import UserError
from heavylift.memory.activations import LayerShape, Recompute, Workload
from heavylift.memory.fit import (
    DEVICE_RESERVE_BYTES,
    STEP_SLACK,
    Choice,
    Setting,
    choose_ratio,
    device_room,
    fits,
    highest_ratio,
    host_room,
    lowest_ratio,
    remedies,
)
from heavylift.memory.machine import MachineMemory
from heavylift.memory.plan import check_plan
from heavylift.memory.planner import ModelPlanner
from heavylift.models.load import build_on_meta, init_random_weights, load_hf_config, materialise
from heavylift.offload.options import TieredOptions
from heavylift.offload.tiers import place
from heavylift.ranks import Ranks
from heavylift.sharding import make_mesh, shard_model
from heavylift.train.setup import place_states, tiered_options, workload

WORK = Workload(4, 4096, Recompute.FULL, chunk_tokens=512, compiled=True)


def setting(work: Workload = WORK, **more: Any) -> Setting:
    """Everything on the host, schedule auto, but for `more`."""
    return Setting(TieredOptions(**{"tier": Tier.HOST, "schedule": Schedule.AUTO, **more}), work)


def machine(device_gib: float | None, host_gib: float = 512) -> MachineMemory:
    """Free bytes."""
    return MachineMemory(int(host_gib * GIB), None if device_gib is None else int(device_gib * GIB))


def plan_at(planner: ShapePlanner, ratio: float, given: Setting) -> Any:
    """With this share on the host."""
    return planner.plan(replace(given.options, tier=Tier.HOST, ratio=ratio), given.work)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("device_gib", [30, 44.4, 64])
def test_the_device_is_filled_to_the_element(device_gib: float, accumulate: bool) -> None:
    planner, asked = llama_8b(2), setting(accumulate=accumulate)
    choice = choose_ratio(planner, asked, machine(device_gib), 2)
    assert 0 < choice.ratio < 1
    room = device_room(plan_at(planner, choice.ratio, asked), machine(device_gib))
    per_element = 16 if accumulate else 12
    assert 0 <= room < per_element
    # the share that the optimizer makes of it is exactly that number of elements
    numels = [load.shard_numel for load in planner.loads(None)]
    on_device = sum(place(numels, choice.ratio, Tier.HOST))
    assert on_device == round((1 - choice.ratio) * planner.shard_numel)
    one_more = plan_at(planner, 1 - (on_device + 1) / planner.shard_numel, asked)
    assert device_room(one_more, machine(device_gib)) < 0
    assert f"auto is {choice.ratio:.4f}" in choice.why and f"{device_gib:.1f} GiB free on the device" in choice.why


def test_a_large_device_takes_everything_and_without_one_nothing_is_left_open() -> None:
    assert choose_ratio(llama_8b(2), setting(), machine(141), 2).ratio == 0
    choice = choose_ratio(llama_8b(2), setting(), machine(None), 2)
    assert choice == Choice(1.0, "engine.ratio: auto is 1.0: there is no accelerator whose memory could be filled")


def test_a_small_host_is_spared() -> None:
    """All states do not fit the host, the rest fits the device: auto takes it, where ratio 1 is refused."""
    planner, small = llama_8b(2), machine(64, 90)
    assert not fits(plan_at(planner, 1.0, setting()), small, 2)
    choice = choose_ratio(planner, setting(), small, 2)
    assert fits(plan_at(planner, choice.ratio, setting()), small, 2)


def test_what_fits_nowhere_is_an_error_with_what_would_fit() -> None:
    """2 x 45 GiB of states: 15 GiB of room on the device, 20 on the host."""
    planner, small = llama_8b(2), machine(37, 40)
    with pytest.raises(UserError) as caught:
        choose_ratio(planner, setting(), small, 2)
    (problem,) = caught.value.problems
    assert "auto finds no place for the optimizer states (2 x 44.9 GiB)" in problem
    assert "use more GPUs or a smaller model" in problem
    with pytest.raises(UserError, match="train.per_device_train_batch_size"):
        choose_ratio(planner, setting(replace(WORK, micro_batch=64)), machine(44), 2)


@settings(max_examples=60, deadline=None)
@given(
    device_gib=st.floats(5, 160),
    host_gib=st.floats(5, 400),
    num_shards=st.sampled_from([1, 2, 8]),
    micro_batch=st.sampled_from([1, 16]),
    recompute=st.sampled_from(list(Recompute)),
    accumulate=st.booleans(),
)
def test_a_choice_always_fits(
    device_gib: float, host_gib: float, num_shards: int, micro_batch: int, recompute: Recompute, accumulate: bool
) -> None:
    planner, have = llama_8b(num_shards), machine(device_gib, host_gib)
    asked = setting(replace(WORK, micro_batch=micro_batch, recompute=recompute), accumulate=accumulate)
    try:
        choice = choose_ratio(planner, asked, have, num_shards)
    except UserError as error:
        assert len(error.problems) == 1 and "\n" not in error.problems[0]
        assert not any(fits(plan_at(planner, ratio / 8, asked), have, num_shards) for ratio in range(9))
        return
    assert fits(plan_at(planner, choice.ratio, asked), have, num_shards)


def test_the_bounds_of_the_ratio() -> None:
    planner, have = llama_8b(2), machine(44.4, 90)
    low, high = lowest_ratio(planner, setting(), have), highest_ratio(planner, setting(), have, 2)
    assert 0 < low < high < 1
    assert host_room(plan_at(planner, high, setting()), have, 2) >= 0
    assert host_room(plan_at(planner, high + 1e-6, setting()), have, 2) < 0


def apply(words: str, asked: Setting) -> Setting:
    """The setting that a remedy's words ask for."""
    options, work = asked.options, asked.work
    assert work is not None
    for word in words.split():
        key, value = word.split("=")
        if key == "engine.ratio":
            options = replace(options, ratio=float(value))
        elif key == "engine.offload_optimizer":
            options = replace(options, tier=Tier(value))
        elif key == "train.per_device_train_batch_size":
            work = replace(work, micro_batch=int(value))
        elif key == "train.gradient_checkpointing":
            work = replace(work, recompute=Recompute.FULL)
        elif key == "engine.state_format":
            options = replace(options, state_format=StateFormat(value))
        elif key == "engine.gradients_on":
            options = replace(options, gradients_on=Tier(value))
        elif key == "train.cpu_checkpointing":
            work = replace(work, inputs_on_host=True)
        else:
            raise AssertionError(f"unknown key {key}")
    return Setting(options, work)


@pytest.mark.parametrize(
    ("asked", "have", "keys"),
    [
        # the host is too small for all of it
        (setting(), machine(64, 90), {"engine.ratio"}),
        # all states on a device that is too small
        (setting(tier=Tier.DEVICE, ratio=1.0), machine(64), {"engine.offload_optimizer", "engine.ratio"}),
        # the same with the tier not asked for yet, and with activations that are in the way too
        (setting(tier=Tier.DEVICE, ratio=1.0), machine(34, 60), {"engine.gradients_on", "engine.offload_optimizer"}),
        (
            setting(replace(WORK, recompute=Recompute.NOTHING, micro_batch=2)),
            machine(36, 62),
            {"engine.state_format", "train.gradient_checkpointing"},
        ),
        # both hold it, but only with smaller states: the bits stay
        (setting(), machine(30, 76), {"engine.state_format", "engine.ratio"}),
        # and these only with gradients that stay on the device, and smaller states
        (setting(), machine(34, 60), {"engine.state_format", "engine.gradients_on"}),
        # activations of all layers
        (setting(replace(WORK, recompute=Recompute.NOTHING)), machine(50), {"train.gradient_checkpointing"}),
        (setting(replace(WORK, micro_batch=32)), machine(50), {"train.per_device_train_batch_size"}),
        # neither alone is enough
        (
            setting(replace(WORK, micro_batch=8, recompute=Recompute.NOTHING)),
            machine(18),
            {"train.gradient_checkpointing", "train.per_device_train_batch_size"},
        ),
    ],
)
def test_what_is_said_to_fit_fits(asked: Setting, have: MachineMemory, keys: set[str]) -> None:
    planner = llama_8b(2)
    assert not fits(planner.plan(asked.options, asked.work), have, 2)
    found = remedies(planner, asked, have, 2)
    assert any(keys <= {word.split("=")[0] for word in words.split()} for words in found), found
    for words in found:
        changed = apply(words, asked)
        assert fits(planner.plan(changed.options, changed.work), have, 2), words


def test_what_would_just_be_let_through_is_said_too() -> None:
    planner = llama_8b(2)
    asked = setting(gradients_on=Tier.DEVICE)
    split = setting(gradients_on=Tier.DEVICE, state_format=StateFormat.SPLIT)
    least = MachineMemory(planner.plan(split.options, split.work).host_needed_bytes(2, has_device=False), None)
    assert remedies(planner, asked, least, 2) == ["engine.state_format=split"]
    check_plan(planner.plan(split.options, split.work), least, 2, split.options)
    # work made smaller does not help there: activations are not counted without a device
    assert remedies(planner, asked, replace(least, host_available_bytes=least.host_available_bytes - 1), 2) == []


def test_nothing_is_said_to_fit_where_nothing_does() -> None:
    assert remedies(llama_8b(2), setting(), machine(10), 2) == []
    assert remedies(llama_8b(2), setting(), machine(None, 20), 2) == []


# ---- on the ranks of a run -----------------------------------------------------------------------------------------

ROOM = 12345
"""Elements of the states that the fake device of rank 1 has room for; rank 0 has more."""


def placing_job(folder: Path, recipe: Recipe) -> tuple[float, int, int, int]:
    """Ratio, elements of the shard, device bytes of the plan's states, and of the optimizer's, on this rank."""
    hf_config = load_hf_config(folder, False)
    model = build_on_meta(hf_config, recipe.model, torch.float32)
    sharded = shard_model(model, 3, make_mesh(3, "cpu"))
    planner = ModelPlanner(sharded, LayerShape.from_config(hf_config), torch.float32)
    asked = Setting(tiered_options(recipe, [0]), workload(recipe, 32, model, torch.device("cpu")))
    taken = planner.plan(asked.options, asked.work)
    reserve = DEVICE_RESERVE_BYTES + int(STEP_SLACK * taken.step_bytes)
    ranks = Ranks(dist.get_rank(), 2, dist.get_rank(), 2, torch.device("cpu"))
    free = taken.device_bytes + reserve + 12 * ROOM + (0 if ranks.rank == 1 else GIB)
    with patch("heavylift.train.setup.measure", lambda _: MachineMemory(64 * GIB, free)):
        options, plan = place_states(planner, asked.options, asked.work, recipe, ranks)
    materialise(model, torch.device("cpu"))
    init_random_weights(model, 0.02, 1)
    groups = parameter_groups(model, 0.0)
    optimizer = build_optimizer(sharded, groups, options, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    usage = optimizer.usage.device_bytes
    optimizer.close()
    return options.ratio, planner.shard_numel, plan.device_state_bytes, usage


def test_all_ranks_fill_their_device_as_the_fullest_one_allows(tiny_llama_dir: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"model_name_or_path": str(tiny_llama_dir), "init": "random"},
            "data": {"format": "random", "cutoff_len": 32, "num_samples": 4},
            "train": {"output_dir": str(tmp_path / "run")},
            "engine": {"offload_optimizer": "host", "ratio": "auto"},
        }
    )
    for ratio, shard_numel, planned, used in run_on_ranks(2, placing_job, tiny_llama_dir, recipe):
        assert used == planned == 12 * ROOM
        assert round(ratio * shard_numel) == shard_numel - ROOM


# ---- through the recipe ---------------------------------------------------------------------------------------------

GOOD = "model: {model_name_or_path: m}\ndata: {dataset: d}\ntrain:\n  output_dir: o\nengine:\n"


def load(tmp_path: Path, engine: str, *overrides: str) -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + engine)
    return load_recipe(path, overrides)


def test_auto_is_a_ratio(tmp_path: Path) -> None:
    assert load(tmp_path, "  offload_optimizer: host\n  ratio: auto\n").engine.ratio == "auto"
    with pytest.raises(UserError, match="engine.ratio: expected a number from 0 to 1 or auto, got 'automatic'"):
        load(tmp_path, "  offload_optimizer: host\n  ratio: automatic\n")


def test_a_key_of_the_host_tier_without_one_is_an_error_where_the_tier_was_forgotten(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, "  zero_stage: 2\n  ratio: 0.9\n  schedule: deferred\n")
    (problem,) = caught.value.problems
    assert problem == (
        f"{tmp_path / 'recipe.yaml'}:7: engine.ratio: has an effect with engine.offload_optimizer: host only, and that "
        "is not set; add it, or remove engine.ratio, engine.schedule"
    )
    with pytest.raises(UserError, match="command line: engine.cpu_threads: has an effect"):
        load(tmp_path, "  zero_stage: 2\n", "engine.cpu_threads=3")


def test_who_asks_for_the_device_is_told_what_has_no_effect(tmp_path: Path) -> None:
    """The recipe of a run with offload, with one word changed to compare."""
    given = "  offload_optimizer: host\n  ratio: 0.9\n  schedule: deferred\n  native_kernel: false\n"
    assert load(tmp_path, given).engine.keys_without_effect == []
    engine = load(tmp_path, given, "engine.offload_optimizer=device").engine
    assert engine.keys_without_effect == ["ratio", "schedule", "native_kernel"]
    # a written-back recipe has every key, most at their defaults
    defaults = (
        "  offload_optimizer: device\n  ratio: 1.0\n  schedule: auto\n  cpu_threads: auto\n  native_kernel: true\n"
    )
    assert load(tmp_path, defaults).engine.keys_without_effect == []


@pytest.mark.soak
def test_a_run_says_what_auto_came_to_and_keeps_it(
    run_heavylift: Callable[..., Finished], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = write_recipe(engine={"offload_optimizer": "host", "ratio": "auto"}, train={"max_steps": 1})
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    ended = run_heavylift("train", recipe, "export.save=false", env=env)
    assert ended.rc == 0, ended.stderr
    assert ended.stderr.count("engine.ratio: auto is 1.0: there is no accelerator") == 1
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["engine"]["ratio"] == 1.0
    told = run_heavylift(
        "train",
        recipe,
        "export.save=false",
        "engine.offload_optimizer=device",
        "train.overwrite_output_dir=true",
        env=env,
    )
    assert told.rc == 0, told.stderr
    assert "engine.ratio: without effect, as engine.offload_optimizer is device" in told.stderr
