"""Elastic batch sizes: one train_batch_size that as many numbers of GPUs as possible can keep.

`compute_elastic_config` answers from the `elasticity` block: candidates are every micro-batch size, and their least
common multiple, times the largest highly composite number (one with more divisors than any smaller) that stays within
`max_train_batch_size`. A number of GPUs fits a batch size when some micro-batch size times some accumulation times the
GPUs is that batch size. The candidate with the most fitting numbers of GPUs is taken; among equals the larger one, or
the smaller with `prefer_larger_batch` false. Version 0.1 of the scheme, and 0.2 where it is the same.

Only the arithmetic: restarting on another number of GPUs is the scheduler's business, and a checkpoint loads on any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from heavylift.errors import UserError

VERSIONS = (0.1, 0.2)
_REQUIRED = ("max_train_batch_size", "micro_batch_sizes")
_KNOWN = {
    *_REQUIRED,
    "enabled",
    "min_gpus",
    "max_gpus",
    "min_time",
    "version",
    "prefer_larger_batch",
    "ignore_non_elastic_batch_info",
    "num_gpus_per_node",
    "model_parallel_size",
}


class ElasticityError(UserError):
    """Base of the errors of this module."""


class ElasticityConfigError(ElasticityError):
    """The `elasticity` block is missing, switched off or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The number of GPUs does not fit the batch size."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the configuration has an `elasticity` block that is on."""
    block = ds_config.get("elasticity")
    return isinstance(block, Mapping) and bool(block.get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """(train_batch_size, numbers of GPUs that fit), and with a `world_size` or `return_microbatch` the micro-batch too.

    The micro-batch is the largest that fits `world_size`. `target_deepspeed_version` has no effect. Raises
    ElasticityConfigError for the block, ElasticityIncompatibleWorldSize when `world_size` does not fit.
    """
    block = _checked(ds_config)
    micro_batches = sorted(set(block["micro_batch_sizes"]))
    smallest, largest = int(block.get("min_gpus", 1)), int(block.get("max_gpus", 10000))
    best, fitting = _best_batch(
        micro_batches, block["max_train_batch_size"], smallest, largest, bool(block.get("prefer_larger_batch", True))
    )
    if world_size == 0 and not return_microbatch:
        return best, fitting
    if world_size == 0:
        return best, fitting, micro_batches[-1]
    if world_size not in fitting:
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: {world_size} GPUs do not fit train_batch_size {best}; fitting: {_shorten(fitting)}"
        )
    micro = max(m for m in micro_batches if best % (world_size * m) == 0)
    return best, fitting, micro


def fitting_gpus(batch_size: int, micro_batches: Sequence[int], smallest: int, largest: int) -> list[int]:
    """Numbers of GPUs in [smallest, largest] that reach `batch_size` with some micro-batch size."""
    found: set[int] = set()
    for micro in micro_batches:
        if batch_size % micro == 0:
            most = batch_size // micro
            found.update(n for n in _divisors(most) if smallest <= n <= largest)
    return sorted(found)


def _best_batch(
    micro_batches: Sequence[int], limit: int, smallest: int, largest: int, prefer_larger: bool
) -> tuple[int, list[int]]:
    bases = [*micro_batches, math.lcm(*micro_batches)]
    candidates = {base * _highly_composite_up_to(limit // base) if base < limit else base for base in bases}
    candidates = {c for c in candidates if c <= limit}
    best = 0
    best_fitting: list[int] = []
    for candidate in sorted(candidates, reverse=prefer_larger):
        fitting = fitting_gpus(candidate, micro_batches, smallest, largest)
        if len(fitting) > len(best_fitting):
            best, best_fitting = candidate, fitting
    if not best_fitting:
        raise ElasticityConfigError(
            f"elasticity: no batch size up to {limit} fits {smallest} to {largest} GPUs with micro_batch_sizes "
            f"{list(micro_batches)}"
        )
    return best, best_fitting


def _highly_composite_up_to(limit: int) -> int:
    """The largest number up to `limit` with more divisors than every smaller one (OEIS A002182)."""
    best, most = 1, 1
    # powers of two times small primes: every highly composite number is a product of the first primes, with
    # exponents that do not grow
    for number in sorted(_smooth_numbers(limit)):
        count = len(_divisors(number))
        if count > most:
            best, most = number, count
    return best


def _smooth_numbers(limit: int) -> set[int]:
    found = {1}

    def extend(number: int, index: int, most: int) -> None:
        primes = (2, 3, 5, 7, 11, 13, 17, 19, 23)
        if index == len(primes):
            return
        for exponent in range(1, most + 1):
            number *= primes[index]
            if number > limit:
                return
            found.add(number)
            extend(number, index + 1, exponent)

    extend(1, 0, 64)
    return found


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _checked(ds_config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('elasticity: no block, or not enabled; add "elasticity": {"enabled": true, ...}')
    block: Mapping[str, Any] = ds_config["elasticity"]
    problems = [f"elasticity.{key}: missing" for key in _REQUIRED if key not in block]
    problems += [f"elasticity.{key}: not a key; it takes {', '.join(sorted(_KNOWN))}" for key in block.keys() - _KNOWN]
    sizes = block.get("micro_batch_sizes", [1])
    if not isinstance(sizes, Sequence) or not sizes or not all(_is_count(size) for size in sizes):
        problems.append(f"elasticity.micro_batch_sizes: expected whole numbers from 1 on, got {sizes!r}")
    for key in ("max_train_batch_size", "min_gpus", "max_gpus"):
        if not _is_count(block.get(key, 1)):
            problems.append(f"elasticity.{key}: expected a whole number from 1 on, got {block[key]!r}")
    if block.get("version", 0.2) not in VERSIONS:
        problems.append(f"elasticity.version: expected one of {VERSIONS}, got {block['version']!r}")
    for key in ("num_gpus_per_node", "model_parallel_size"):
        if block.get(key, 1) != 1:
            problems.append(f"elasticity.{key}: only 1 is supported, got {block[key]!r}; leave it out")
    if problems:
        raise ElasticityConfigError(*problems)
    if not block.get("ignore_non_elastic_batch_info", False):
        clash = [key for key in ("train_batch_size", "train_micro_batch_size_per_gpu") if key in ds_config]
        if clash:
            raise ElasticityConfigError(
                f"{clash[0]}: elasticity decides it; remove it, or set elasticity.ignore_non_elastic_batch_info"
            )
    return block


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _shorten(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return shown if len(numbers) <= 12 else f"{shown} and {len(numbers) - 12} more"
