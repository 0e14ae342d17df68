"""Elastic batch sizes: what fits how many GPUs, against counting by hand, and wrong blocks."""

from __future__ import annotations

from typing import Any

import pytest

from heavylift.api import elasticity


def elastic(**more: Any) -> dict[str, Any]:
    block = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}
    return {"elasticity": {**block, "min_gpus": 1, "max_gpus": 10000, **more}}


def test_elastic_batch_sizes() -> None:
    batch, gpus = elasticity.compute_elastic_config(elastic())
    assert batch == 1680  # 2 x 840, of all candidates the one with the most divisors among its micro-batch counts
    assert gpus == elasticity.fitting_gpus(batch, [2, 4, 6], 1, 10000)
    assert all(any(batch % (n * m) == 0 for m in (2, 4, 6)) for n in gpus) and 9 not in gpus
    by_hand = {
        candidate: len(elasticity.fitting_gpus(candidate, [2, 4, 6], 1, 10000))
        for candidate in (1440, 1680, 1920, 2000)
    }
    assert by_hand[1680] == max(by_hand.values())
    assert elasticity.compute_elastic_config(elastic(), world_size=28)[2] == 6
    assert elasticity.compute_elastic_config(elastic(max_gpus=8), return_microbatch=True)[1:] == (
        [1, 2, 3, 4, 5, 6, 7, 8],
        6,
    )
    with pytest.raises(elasticity.ElasticityIncompatibleWorldSize, match="9 GPUs do not fit train_batch_size 1680"):
        elasticity.compute_elastic_config(elastic(max_gpus=8), world_size=9)


def test_highly_composite_numbers() -> None:
    known = [1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 720720]
    for number in known:
        assert elasticity._highly_composite_up_to(number) == number
        assert number == 1 or elasticity._highly_composite_up_to(number - 1) < number
    assert elasticity._highly_composite_up_to(47) == 36


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no block, or not enabled"),
        (elastic(enabled=False), "no block, or not enabled"),
        (elastic(micro_batch_sizes=[]), "micro_batch_sizes: expected whole numbers"),
        (elastic(micro_batch_sizes=[2.5]), "micro_batch_sizes: expected whole numbers"),
        (elastic(max_gpus=0), "max_gpus: expected a whole number"),
        (elastic(version=3), "version: expected one of"),
        (elastic(model_parallel_size=2), "only 1 is supported"),
        (elastic(speed=1), "elasticity.speed: not a key"),
        (elastic(max_train_batch_size=1), "no batch size up to 1 fits"),
        ({**elastic(), "train_batch_size": 8}, "train_batch_size: elasticity decides it"),
    ],
)
def test_wrong_elastic_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(elasticity.ElasticityConfigError, match=message):
        elasticity.compute_elastic_config(config)
