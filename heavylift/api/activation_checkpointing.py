"""`deepspeed.checkpointing`: a script's own activation checkpointing, on `torch.utils.checkpoint`.

    heavylift.checkpointing.configure(None, checkpoint_in_cpu=True)
    y = heavylift.checkpointing.checkpoint(layer, x)

The random state of forward is restored for the recomputation, so dropout drops the same. Only `checkpoint_in_cpu` has
an effect; the others of DeepSpeed's switches concern model parallelism or its own buffers, and are told about once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from heavylift.config.deepspeed.sources import read_source
from heavylift.errors import UserError

logger = logging.getLogger(__name__)


@dataclass
class _State:
    """What `configure` has said, for the process."""

    is_configured: bool = False
    in_cpu: bool = False


_state = _State()
_NO_EFFECT = {
    "partition_activations": "there is no model parallelism to split activations over",
    "contiguous_checkpointing": "the allocator does not fragment here",
    "num_checkpoints": "as many are kept as checkpoint() is called",
    "synchronize": "nothing needs it",
    "profile": "use the flops profiler",
}


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets what `checkpoint` does. `deepspeed_config` (a dict or a path): its `activation_checkpointing` block, which
    the arguments override. Raises UserError for a configuration that cannot be read."""
    in_cpu = False
    if deepspeed_config is not None:
        in_cpu = _cpu_checkpointing_of(deepspeed_config)
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "synchronize": synchronize,
        "profile": profile,
    }
    for name, value in given.items():
        if value:
            logger.warning("checkpointing.configure: %s has no effect: %s", name, _NO_EFFECT[name])
    _state.in_cpu = in_cpu if checkpoint_in_cpu is None else checkpoint_in_cpu
    _state.is_configured = True


def _cpu_checkpointing_of(config: Any) -> bool:
    block = read_source(config).values.get("activation_checkpointing", {})
    value = block.get("cpu_checkpointing", False) if isinstance(block, dict) else None
    if not isinstance(value, bool):
        raise UserError(f"activation_checkpointing.cpu_checkpointing: expected true or false, got {value!r}")
    return value


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`; its activations are computed again in backward instead of being kept."""
    has_cuda = torch.cuda.is_available()
    keep = torch.autograd.graph.save_on_cpu(pin_memory=has_cuda) if _state.in_cpu else nullcontext()
    with keep:
        return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


non_reentrant_checkpoint = checkpoint


def is_configured() -> bool:
    """Whether `configure` has been called since the start or the last `reset`."""
    return _state.is_configured


def reset() -> None:
    """Nothing is kept between calls that would have to go. The configuration stays, as in DeepSpeed."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds this process's generators. Without model parallelism there is one stream of random numbers."""
    torch.manual_seed(seed)
