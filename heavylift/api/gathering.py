"""`zero.GatheredParameters`: parameters whole inside a `with`, on every rank.

    with heavylift.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        if rank == 0:
            model.head.weight.zero_()

It works on parameters made under `zero.Init` and on those of an engine. Whole parameters are left as they are. With
`modifier_rank` everybody takes that rank's values at the end; without, what was written is discarded. Of an engine's
parameter the master follows where the bits changed, and keeps its own where they did not, so that looking with a
`modifier_rank` and changing nothing costs no precision.

Entering and leaving are collectives: every rank passes the same parameters. A backward inside is not supported.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from heavylift.api.distributed import exchange_device
from heavylift.api.gathered import Place, find_places
from heavylift.api.owners import owner_of, states_of, write_weight
from heavylift.api.partition import (
    ZeroParamStatus,
    close_discarding,
    close_from,
    find_partition,
    is_closed,
    mark,
    open_whole,
)
from heavylift.api.shards import own_part, whole_value
from heavylift.errors import UserError


class WholeParameter(torch.Tensor):
    """What a DTensor parameter is while it is gathered: a plain tensor, that `isinstance` takes for an `nn.Parameter`.

    Python lets an object change its class only to one with the same slots, so DTensor's are here, empty.
    """

    __slots__ = tuple(DTensor.__slots__)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(whole: torch.Tensor, requires_grad: bool) -> WholeParameter:
        """`whole` as such a parameter, the same memory."""
        made = torch.Tensor._make_subclass(WholeParameter, whole, requires_grad)
        made._is_param = True
        for slot in WholeParameter.__slots__:
            setattr(made, slot, None)
        return made


class GatheredParameters:
    """Context in which `params` (one, several, or all of a module) are whole.

    `modifier_rank`: the rank whose values everybody takes at the end; None: reading only. `fwd_module` has no effect.
    Raises UserError for something that is no parameter, a rank that is none, and a shape that has been changed inside.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if modifier_rank is not None and not 0 <= modifier_rank < world_size:
            raise UserError(
                f"GatheredParameters: modifier_rank should be one of the {world_size} ranks (from 0), got "
                f"{modifier_rank}"
            )
        self._params = _unique(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._opened: list[nn.Parameter] = []
        self._sharded: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Parameters that are plain and whole now, each with the tensor that holds its DTensor meanwhile."""
        self._places: dict[int, Place] = {}
        """By the id of the given parameter: where an engine has it."""
        self._versions: dict[int, int] = {}

    def __enter__(self) -> None:
        self._places = find_places(self._params)
        self._check_idle()
        self._opened = open_whole(p for p in self._params if is_closed(p))
        for param in self._params:
            place = self._places.get(id(param))
            if place is not None and param is place.whole:
                place.gather()  # what the last forward left, or was made to hold on to: whole as it is
            elif isinstance(param, DTensor):
                if place is not None:
                    place.release()  # the module must show this very object
                    place.show_plain(True)
                self._sharded.append((param, _make_whole(param)))
        self._versions = {id(param): param._version for param in self._params if not param.is_inference()}

    def _check_idle(self) -> None:
        """Raises UserError for a write that a forward or backward under way would not see, or would see half of."""
        if self._modifier_rank is not None and any(place.is_busy for place in self._places.values()):
            raise UserError(
                "GatheredParameters: with modifier_rank, in the middle of the forward or backward that uses these "
                "parameters; write before or after it (an engine whose forward has failed may have to be made anew)"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writes = self._modifier_rank is not None and kind is None
        written = self._written() if writes else set()
        sharded, self._sharded = self._sharded, []
        gathered = [param for param in self._params if self._is_gathered(param)]
        for param in gathered if writes else ():
            dist.broadcast(param.detach(), src=self._modifier_rank)
            _write_back(self._places[id(param)].shard, param.detach())
        for param, holder in reversed(sharded):
            whole = param.detach()
            if writes:
                dist.broadcast(whole, src=self._modifier_rank)
            with torch.no_grad():
                torch.utils.swap_tensors(param, holder)
            if id(param) in self._places:
                self._places[id(param)].show_plain(False)
            if writes:
                _write_back(param, whole)
        for param in self._params:
            place = self._places.get(id(param))
            if place is not None:
                place.release()  # the next forward gathers anew
                if id(param) in written:
                    place.count_write()
                elif self._is_gathered(param):
                    place.accept_write()
        handled = {id(param) for param in (*gathered, *(param for param, _ in sharded), *self._opened)}
        if self._opened and kind is None and self._modifier_rank is not None:
            close_from(self._opened, self._modifier_rank)
        elif self._opened:
            close_discarding(self._opened)
        self._opened, self._places = [], {}
        if writes:
            self._agree([param for param in self._params if id(param) not in handled])

    def _is_gathered(self, param: nn.Parameter) -> bool:
        place = self._places.get(id(param))
        return place is not None and param is place.whole

    def _written(self) -> set[int]:
        """Ids of the parameters that the modifying rank has written, known on all ranks. A collective."""
        known = [p for p in self._params if id(p) in self._places]
        if not known:
            return set()
        moved = [p._version != self._versions.get(id(p)) for p in known]
        flags = torch.tensor(moved, dtype=torch.uint8, device=exchange_device(known[0].device))
        assert self._modifier_rank is not None
        dist.broadcast(flags, src=self._modifier_rank)
        return {id(param) for param, flag in zip(known, flags.tolist(), strict=True) if flag}

    def _agree(self, params: list[nn.Parameter]) -> None:
        """Parameters that were whole before: where an engine or `zero.Init` has them, every rank must hold the same."""
        for param in params:
            if dist.is_initialized() and (owner_of(param) is not None or find_partition(param) is not None):
                dist.broadcast(param.detach(), src=self._modifier_rank)


def _unique(params: Any) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    elif not isinstance(params, Iterable):
        raise UserError(f"GatheredParameters: expected parameters or a module, got {type(params).__name__}")
    unique: dict[int, nn.Parameter] = {}
    for param in params:
        if isinstance(param, nn.Parameter):
            unique[id(param)] = param
        # a bias that is not there, a buffer: nothing to gather
        elif param is not None and not isinstance(param, torch.Tensor):
            raise UserError(f"GatheredParameters: expected parameters or a module, got {type(param).__name__}")
    return list(unique.values())


@torch.no_grad()
def _make_whole(param: nn.Parameter) -> nn.Parameter:
    """The very object `param` becomes a plain whole parameter; returns what holds the shard meanwhile.

    Scripts hold on to parameter objects, and modules and optimizers do: it has to be the same object.
    """
    states = states_of(param)
    if states is not None:
        states.group.gate.wait()  # its updated shard may still be under way
    holder: Any = WholeParameter.of(whole_value(param), param.requires_grad)
    holder.__dict__.update({name: value for name, value in param.__dict__.items() if name.startswith("ds_")})
    torch.utils.swap_tensors(param, holder)
    if "ds_id" in param.__dict__:
        mark(param, param.shape, ZeroParamStatus.AVAILABLE)
    return holder


def _write_back(param: nn.Parameter, whole: torch.Tensor) -> None:
    if whole.shape != param.shape:
        raise UserError(
            f"GatheredParameters: a parameter of shape {tuple(param.shape)} was given the shape {tuple(whole.shape)}; "
            "change shapes before initialize()"
        )
    write_weight(param, own_part(param, whole.to(param.dtype)))
