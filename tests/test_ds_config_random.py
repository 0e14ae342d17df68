"""Random configs: settings or UserError, never anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heavylift.config.deepspeed.convert import convert
from heavylift.config.deepspeed.explain import key_table, settings_table
from heavylift.config.deepspeed.keys import Block, block_of, canonical_names
from heavylift.config.deepspeed.parse import interpret
from heavylift.config.deepspeed.places import key_lines, line_of
from heavylift.config.deepspeed.schema import DeepSpeedConfig
from heavylift.config.deepspeed.settings import Settings
from heavylift.config.deepspeed.sources import parse_json, read_source
from heavylift.config.deepspeed.torch_optimizers import TORCH_OPTIMIZERS
from heavylift.config.deepspeed.training import (
    REQUIRED_PARAMS,
    SCHEDULERS,
    AdamParams,
    Optimizer,
    Scheduler,
)
from heavylift.config.schema import StateFormat, Tier
from heavylift.config.words import expected
from heavylift.errors import UserError


def _all_names(block: type[Block]) -> Iterator[str]:
    yield from canonical_names(block)
    for field in block.model_fields.values():
        inner = block_of(field)
        if inner is not None:
            yield from _all_names(inner)


NAMES = sorted({*_all_names(DeepSpeedConfig), *AdamParams.model_fields, "type", "params", "max_grad_norm", "", "\n"})
TYPES = ["AdamW", "adam", *TORCH_OPTIMIZERS, *SCHEDULERS, "Lamb", "adamww", ""]
ODD = [None, True, False, -3, 0, 1, 12, 2**70, 10**400, 0.5, -1e308, float("nan"), float("inf"), b"x", object(), 1j]
ODD += ["auto", "cpu", "none", "nvme", "fp16", "bf16", "log", "mean", "true", "3", "\0", "ü\n", "x" * 300, *TYPES]


def anything(random: Random, depth: int = 0) -> Any:
    """Any value, nested at random."""
    choice = random.randrange(8 if depth < 4 else 6)
    if choice == 6:
        return [anything(random, depth + 1) for _ in range(random.randrange(4))]
    if choice == 7:
        return {random.choice(NAMES): anything(random, depth + 1) for _ in range(random.randrange(4))}
    return random.choice(ODD)


def fitting(random: Random, field: Any) -> Any:
    """Mostly a value of the kind that the key takes, so that the checks behind the types are reached."""
    words = expected(field)
    if random.random() < 0.03:
        return random.choice(["auto", None])
    if "a list of texts" in words:
        return ["x"] * random.randrange(3)
    if "a list" in words:
        return [random.random() * 0.99, random.random() * 0.99]
    if "one of" in words:
        return random.choice([word for word in words.removeprefix("one of ").split(", ") if " " not in word])
    kinds = {
        "whole number": [0, 1, 1, 2, 3, 8, 5e8],
        "a number": [0, 0.1, 0.5, 0.99, 1],
        "true or false": [True, False],
        "text": ["x", "logs"],
        "a mapping": [{}, {"enabled": True}, {"enabled": False}],
    }
    return random.choice(next(values for kind, values in kinds.items() if kind in words))


def random_block(random: Random, block: type[Block]) -> Any:
    """Some keys of the block, under any of their names, mostly with values that fit."""
    if block in (Optimizer, Scheduler):
        adams: dict[str, type[Block]] = {"AdamW": AdamParams, "adam": AdamParams}
        kinds = {**adams, **TORCH_OPTIMIZERS} if block is Optimizer else SCHEDULERS
        kind = random.choice(sorted(kinds if block is Scheduler or random.random() < 1 / 3 else adams))
        return {"params": random_block(random, kinds[kind]), "type": kind}
    names = canonical_names(block)
    chosen = random.sample(sorted(names), min(len(names), random.randint(0, 3)))
    found: dict[Any, Any] = {}
    for name in [*chosen, *REQUIRED_PARAMS.get(block.__name__, ())]:
        inner = block_of(block.model_fields[names[name]])
        if random.random() < 0.02:
            found[name] = anything(random)
        elif inner is not None:
            found[name] = random_block(random, inner)
        else:
            found[name] = fitting(random, block.model_fields[names[name]])
    if random.random() < 0.05:
        found[random.choice(NAMES)] = anything(random)
    return found


def random_config(random: Random) -> dict[Any, Any]:
    """A config; one in eight is only noise."""
    if random.random() < 1 / 8:
        return {random.choice([*NAMES, 3, None, "auto"]): anything(random) for _ in range(random.randrange(6))}
    config = random_block(random, DeepSpeedConfig)
    blocks = ["zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "heavylift"]
    for name in random.sample(blocks, 2):
        config[name] = random_block(random, DeepSpeedConfig.model_fields[name].annotation)  # type: ignore[arg-type]
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and random.random() < 0.8:
        zero |= {"stage": random.randrange(4), "offload_optimizer": {"device": random.choice(["cpu", "none"])}}
    if random.random() < 0.9:  # most would end at the batch equation
        for name in ("train_batch_size", "gradient_accumulation_steps", "data_parallel_size"):
            config.pop(name, None)
        config["train_micro_batch_size_per_gpu"] = 2
    return config


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_a_random_config_is_understood_or_refused(seed: int, world_size: int) -> None:
    random = Random(seed)
    config = random_config(random)
    defaults = {"lr": anything(random), "total_num_steps": 9} if random.random() < 0.5 else None
    found = interpret(config, world_size, defaults=defaults)
    assert bool(found.problems) == (found.settings is None), config
    assert all("\n" not in problem for problem in found.problems), config
    assert key_table(found.reading).row_count == len(found.reading.reports)
    lines = key_lines(json.dumps(config, indent=1, default=str))
    # None as a key, which is shown as nothing
    assert all(line_of(report.path, lines) for report in found.reading.reports if report.path != "nothing"), config
    if found.settings is not None:
        assert isinstance(found.settings, Settings)
        assert settings_table(found.settings).row_count > 30
        convert(found.settings, found.reading, model="m", dataset="d", output_dir="o", world_size=None)


PIECES = [
    *'{}[]:,"#/*\n\\',
    "//",
    "/*",
    "*/",
    " ",
    '"a"',
    "'",
    "'''",
    "true",
    "null",
    "1e5",
    "-",
    "NaN",
    "auto",
    "\0",
    "é",
    "u12",
]


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(max_size=40))
def test_a_random_text_is_a_mapping_or_refused(text: str) -> None:
    for given_text in (text, "{" + text, '{"a": 1,' + text + "}"):
        try:
            assert isinstance(parse_json(given_text, "f"), dict)
        except UserError as error:
            assert len(error.problems) == 1 and error.problems[0].startswith("f:")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=40))
def test_a_random_name_is_refused(name: str) -> None:
    if name not in (".", "..", "/") and not Path(name.replace("\0", "")).exists():
        with pytest.raises(UserError):
            read_source(name)


def test_the_random_configs_are_of_both_kinds() -> None:
    found = [interpret(random_config(Random(seed)), 2) for seed in range(300)]
    good = [one.settings for one in found if one.settings is not None]
    assert 80 < len(good) < 220
    assert any(one.optimizer for one in good) and any(one.scheduler for one in good)
    assert {one.stage for one in good} == {0, 1, 2, 3} and any(one.loss_scale for one in good)
    assert any(one.offload.tier is Tier.HOST for one in good)
    # bfloat16 parameters, which `split` needs, are rare among them
    assert {one.state_format for one in good} >= set(StateFormat) - {StateFormat.SPLIT}
    assert any(one.offload.streamed_share or one.offload.gradients_on is Tier.DEVICE for one in good)
