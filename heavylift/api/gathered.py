"""Parameters that FSDP2 has gathered: which shard each of them belongs to.

After a forward some or all groups stay gathered, until backward, or until somebody shards them again where no backward
follows: a module's parameters are then plain whole tensors, other objects than the DTensors that an optimizer knows,
and what is written into them ends with the next `reshard`. Scripts hold on to either object.

Engines register their models, held weakly. Left out: gathering for a script (`heavylift.api.gathering`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from heavylift.api.partition import ZeroParamStatus, mark
from heavylift.errors import UserError
from heavylift.sharding import ShardedModel, fsdp_params, gathered_twin, param_group

_models: list[weakref.ref[ShardedModel]] = []


def register_model(sharded: ShardedModel) -> None:
    """Makes the parameters of `sharded` known. Registering twice does no harm."""
    _models[:] = [ref for ref in _models if ref() is not None and ref() is not sharded]
    _models.append(weakref.ref(sharded))


@dataclass(frozen=True)
class Place:
    """One parameter of a registered model."""

    module: FSDPModule
    """Gathers the group."""
    _param: Any
    """FSDP2's record of the parameter, and of the group."""
    _group: Any
    _sharded: ShardedModel

    @property
    def shard(self) -> nn.Parameter:
        """The DTensor (a plain tensor while `GatheredParameters` has made it one): what an optimizer steps."""
        shard: nn.Parameter = self._param.sharded_param
        return shard

    @property
    def whole(self) -> nn.Parameter | None:
        """What FSDP2 shows instead while the group is gathered; None before the first time."""
        return gathered_twin(self._param)

    @property
    def is_gathered(self) -> bool:
        """Whether the module shows `whole`."""
        return bool(self._group.is_unsharded)

    @property
    def is_busy(self) -> bool:
        """Whether the group's forward or backward runs: it must stay gathered until that ends."""
        return self._group._training_state.name != "IDLE"

    def gather(self) -> None:
        """Makes `whole` what its name says. A collective where it is not gathered."""
        self.module.unshard()

    def release(self) -> None:
        """Shards the group again, so that the next forward gathers what the shards are by then."""
        if self.is_gathered and not self.is_busy:
            self.module.reshard()

    def show_plain(self, is_plain: bool) -> None:
        """Whether `shard` is a plain whole tensor from now on. FSDP2 looks for its shard after every `load_state_dict`
        of the module, which a script may call on one."""
        if is_plain:
            vars(self._param)["reset_sharded_param"] = lambda: None
        else:
            vars(self._param).pop("reset_sharded_param", None)

    def prepare_write(self, call: str) -> None:
        """Before `shard` is written. Raises UserError, with the name `call`, in the middle of forward or backward."""
        if self.is_busy:
            raise UserError(
                f"{call}: a parameter cannot be set while the forward or backward that uses it runs; set it before or "
                "after (an engine whose forward has failed may have to be made anew)"
            )
        self.release()

    def count_write(self) -> None:
        """After `shard` was written. A backward that needs the old value will say so, as of a plain parameter."""
        if self.whole is not None and not self.whole.is_inference():
            torch.autograd.graph.increment_version(self.whole)
        self.accept_write()

    def accept_write(self) -> None:
        """What has been written into `whole` until now is in `shard`, or its loss has been told."""
        if self.whole is not None and not self.whole.is_inference():
            self._sharded.accept_write(self.whole)


def mark_gathered(sharded: ShardedModel) -> None:
    """For stage 3: what FSDP2 shows while a group is gathered bears the marks of a parameter that is whole."""

    def marking(param: Any) -> Callable[[], None]:
        make = param.init_unsharded_param

        def make_marked() -> None:
            make()
            del vars(param)["init_unsharded_param"]  # it is made once
            whole = gathered_twin(param)
            assert whole is not None, param._param_fqn
            mark(whole, whole.shape, ZeroParamStatus.AVAILABLE)

        return make_marked

    for group in sharded.groups:
        for param in fsdp_params(group.module):
            vars(param)["init_unsharded_param"] = marking(param)


def find_places(params: Iterable[torch.Tensor]) -> dict[int, Place]:
    """By their ids, where parameters lie, each given by either of its two objects; those of no registered model are
    left out. At most one pass over all models."""
    wanted = {id(param) for param in params}
    found: dict[int, Place] = {}
    for place in _places():
        for one in (place.shard, place.whole):
            if id(one) in wanted:
                found.setdefault(id(one), place)
        if len(found) == len(wanted):
            break
    return found


def find_place(param: torch.Tensor) -> Place | None:
    """Where `param`, either of its two objects, lies; None for one of no registered model."""
    return find_places([param]).get(id(param))


def shard_of(param: nn.Parameter) -> nn.Parameter:
    """What an optimizer knows of `param`: the parameter itself, or the shard of a gathered one."""
    place = find_place(param)
    return param if place is None else place.shard


def _places() -> Iterator[Place]:
    for ref in reversed(_models):
        sharded = ref()
        for gather_group in () if sharded is None else sharded.groups:
            module = gather_group.module
            assert isinstance(module, FSDPModule) and sharded is not None
            group = param_group(module)
            for param in fsdp_params(module):
                yield Place(module, param, group, sharded)
