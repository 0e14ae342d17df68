"""`save_pretrained` of a sharded model of transformers: rank 0 writes the whole weights, as of one that is not sharded.

    engine.module.save_pretrained("folder")          # on every rank

Left out: what needs other tensors than the module's own (`state_dict=` is passed on as it is), and a model that rank
0's memory cannot hold (`save_checkpoint` and `zero_to_fp32`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from heavylift.api import checkpoint
from heavylift.api.distributed import cpu_group
from heavylift.api.recompute import is_hugging_face
from heavylift.api.whole_state import whole_weights
from heavylift.errors import UserError

_NOT_GIVEN: Any = object()


def gather_before_saving(module: nn.Module, scalars: frozenset[str], is_sharded: bool) -> None:
    """Wraps `save_pretrained` of every model of transformers in `module`.

    scalars: names in `module` of parameters that had no dimension. is_sharded: whether it takes all ranks to have the
    weights whole.
    """
    for prefix, part in module.named_modules():
        if is_hugging_face(part):
            start = f"{prefix}." if prefix else ""
            own = frozenset(name.removeprefix(start) for name in scalars if name.startswith(start))
            part.save_pretrained = _saving(part, own, is_sharded)


def _saving(module: Any, scalars: frozenset[str], is_sharded: bool) -> Callable[..., None]:
    save = module.save_pretrained

    @functools.wraps(save)
    def save_pretrained(
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = _NOT_GIVEN,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        needs_all = is_sharded and dist.get_world_size() > 1
        if kwargs.get("distributed_checkpoint") or (state_dict is not _NOT_GIVEN and state_dict is not None):
            save(save_directory, is_main_process, None if state_dict is _NOT_GIVEN else state_dict, *args, **kwargs)
            return
        if state_dict is None and needs_all:
            # such as `state_dict=engine.consolidated_state_dict()`, which is None where it is not rank 0
            if dist.get_rank() > 0:
                return
            raise UserError(
                "save_pretrained: state_dict=None on rank 0; leave state_dict out on every rank, and the weights are "
                "gathered, or pass engine.consolidated_state_dict()"
            )
        if needs_all:
            checkpoint.await_all_ranks("save_pretrained", cpu_group(), checkpoint.ARRIVAL_TIMEOUT)
        weights = whole_weights(module, scalars)

        def action() -> None:
            save(save_directory, is_main_process, weights, *args, **kwargs)

        if needs_all:
            checkpoint.on_first_rank(action)
        elif dist.get_rank() == 0:
            action()

    return save_pretrained
