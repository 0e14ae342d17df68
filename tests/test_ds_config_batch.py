"""The batch equation: any two of three, one of three, and what is said where nothing solves it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ds_configs import keys_of_note

from heavylift.config.deepspeed.batch import solve_batch
from heavylift.config.deepspeed.parse import load_settings
from heavylift.errors import UserError

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def test_any_two_of_three_and_all_three() -> None:
    for micro, accumulation, world_size in itertools.product((1, 2, 3, 8), (1, 2, 5), (1, 2, 4, 7)):
        train = micro * accumulation * world_size
        want = (train, micro, accumulation)
        for given in ((train, micro, None), (train, None, accumulation), (None, micro, accumulation), want):
            sizes, problem = solve_batch(*given, world_size)
            assert problem is None and sizes is not None
            assert (sizes.train_batch, sizes.micro_batch, sizes.accumulation) == want, (given, world_size)


def test_one_of_three() -> None:
    for (train, micro), want in {(12, None): (12, 3, 1), (None, 5): (20, 5, 1)}.items():
        sizes, problem = solve_batch(train, micro, None, 4)
        assert problem is None and sizes is not None
        assert (sizes.train_batch, sizes.micro_batch, sizes.accumulation) == want


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {TRAIN: 30, MICRO: 4, ACCUMULATION: 2},
            "got 30 (file) = 4 (file) * 2 (file) * 4 (launcher); change train_batch_size to 32, or remove one of the",
        ),
        (
            {TRAIN: 30, MICRO: 4},
            "got 30 (file) = 4 (file) * ? (not given) * 4 (launcher); no whole gradient_accumulation_steps solves it; "
            "change train_batch_size to a multiple of 16, such as 32",
        ),
        (
            {TRAIN: 30, ACCUMULATION: 4},
            "got 30 (file) = ? (not given) * 4 (file) * 4 (launcher); no whole train_micro_batch_size_per_gpu solves",
        ),
        ({TRAIN: 3}, "got 3 (file) = ? (not given) * 1 (default) * 4 (launcher)"),
        ({TRAIN: 4, MICRO: 8}, "such as 32"),
        ({ACCUMULATION: 4}, "only gradient_accumulation_steps is given; expected train_batch_size or"),
        ({}, "none of its keys is given; expected train_batch_size or"),
    ],
)
def test_no_solution_prints_the_equation(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(config, 4)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("ds_config: train_batch_size: ")
    assert said in caught.value.problems[0]


@pytest.mark.parametrize(
    ("config", "defaults", "want", "num_notes"),
    [
        ({TRAIN: "auto", MICRO: "auto", ACCUMULATION: "auto"}, {}, (2, 1, 1), 3),
        ({TRAIN: "auto", MICRO: "auto", ACCUMULATION: "auto"}, {MICRO: 4, ACCUMULATION: 3}, (24, 4, 3), 1),
        ({TRAIN: "auto", MICRO: 3}, {}, (6, 3, 1), 1),
        ({TRAIN: 16, MICRO: "auto", ACCUMULATION: 4}, {}, (16, 2, 4), 1),
        ({TRAIN: 16, MICRO: 4, ACCUMULATION: "auto"}, {}, (16, 4, 2), 1),
        ({TRAIN: 16, MICRO: 4, ACCUMULATION: "auto"}, {ACCUMULATION: 2}, (16, 4, 2), 0),
    ],
)
def test_auto_is_filled_or_solved(
    config: dict[str, Any], defaults: dict[str, int], want: tuple[int, int, int], num_notes: int
) -> None:
    settings = load_settings(config, 2, defaults=defaults)
    assert (settings.batch.train_batch, settings.batch.micro_batch, settings.batch.accumulation) == want
    assert sum(len(keys_of_note(note)) for note in settings.notes) == num_notes
    assert all("nobody filled in" in note for note in settings.notes)


def test_a_bad_size_is_reported_once() -> None:
    with pytest.raises(UserError) as caught:
        load_settings({TRAIN: "x", MICRO: 4, ACCUMULATION: 2}, 4)
    assert len(caught.value.problems) == 1
