"""Methods of a user's module other than `forward`, called through the engine: `engine.sample(x)`, `engine.loss_of(y)`.

They may use parameters, which lie there as shards: FSDP2 gathers them around a call that is given tensors, as around a
forward, so that gradients flow from it too. What a method writes into gathered parameters would be lost; that is
noticed and raised. A call without tensors (`engine.clip_weights()`, or a report that only rank 0 makes) gathers nothing
and sees the shards. Left out: methods of `nn.Module` and of transformers, which come to their parameters through
`forward`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from heavylift.api.gathered import find_place
from heavylift.errors import UserError

_OTHERS = ("torch.", "transformers.", "transformers_modules.", "peft.")


def is_users_method(module: nn.Module, value: Any) -> bool:
    """Whether `value` is a method of `module` that its own class defines."""
    return inspect.ismethod(value) and value.__self__ is module and not value.__module__.startswith(_OTHERS)


def gathered_around(
    module: nn.Module, name: str, around: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """The method `name` of `module`, an `FSDPModule`, with its parameters gathered; every call in `around()`."""
    assert isinstance(module, FSDPModule), type(module)
    method = getattr(module, name)

    @functools.wraps(method)
    def checked(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        versions = {name: (p, p._version) for name, p in module.named_parameters() if not isinstance(p, DTensor)}
        output = method(*args, **kwargs)
        written = [name for name, (param, version) in versions.items() if param._version != version]
        if written:
            for name in written:
                place = find_place(versions[name][0])
                if place is not None:
                    place.accept_write()
            raise UserError(
                f"{method.__qualname__}: it writes into {', '.join(written[:3])}, which are gathered copies while the "
                f"engine calls it, so this would be lost; call engine.module.{method.__name__}(), which sees the shards"
            )
        return output

    # on the instance for as long as it takes to wrap it: `module.name` itself stays what it is
    setattr(module, name, MethodType(checked, module))
    register_fsdp_forward_method(module, name)
    gathering = getattr(module, name)
    delattr(module, name)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
        with around():
            return gathering(*args, **kwargs) if has_tensors else method(*args, **kwargs)

    return run
