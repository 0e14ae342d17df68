"""`zero.Init`: building a model that no rank could hold whole.

    with heavylift.zero.Init():
        model = Model(config)              # every rank runs this
    engine, *_ = heavylift.initialize(model=model, config=...)

Inside, parameters are made whole, where the model's own code makes them, and initialised by it. At most `OPEN_BYTES` of
them stay whole at a time: the oldest are split over the ranks, with the values of rank 0. Code that comes back to a
parameter (`self.apply(init_weights)` at the end of a constructor) finds it whole again: reading an attribute, or
going through `parameters()`, gathers it. So a model has the weights that the same code with rank 0's seed gives without
`zero.Init`, to the bit, whatever the number of ranks.

Every rank must run the same code. Left out: buffers, which stay whole; a process on its own, where parameters stay
as they are; disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from heavylift.api.distributed import init_distributed
from heavylift.api.partition import cast, close_from, find_partition, open_whole, track
from heavylift.config.deepspeed.auto import fillings
from heavylift.config.deepspeed.places import key_lines, line_of
from heavylift.config.deepspeed.reading import read_config
from heavylift.config.deepspeed.sources import read_source
from heavylift.config.words import shown
from heavylift.errors import UserError

OPEN_BYTES = 2**30
"""Parameters that may be whole at a time while a model is built."""
MIN_OPEN = 16
"""So many stay whole in any case: a constructor may hold on to those that it has just made."""

_active: Init | None = None


class Init:
    """Context in which modules are built split over the ranks.

    `module`: split an existing one at once. `dtype`: what floating-point parameters are rounded to when they are
    complete; by default they stay as they are, and `initialize` takes its float32 masters from them. `enabled=False`:
    nothing happens. DeepSpeed's other arguments are accepted: memory-efficient linears, pinning and quantised weights
    have no effect here, and the precision of `config_dict_or_path` (older: `config`) is applied by `initialize`.

    Raises UserError for `remote_device="nvme"`, for groups that are not all ranks, and for a configuration that cannot
    be read or has a key that is wrong by itself; how keys go together is looked at by `initialize`.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        **_: Any,
    ) -> None:
        if remote_device == "nvme":
            raise UserError('zero.Init: remote_device "nvme" is not supported; parameters stay in memory, use "cpu"')
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise UserError(f"zero.Init: dtype= should be a dtype such as torch.bfloat16, got {shown(dtype)}")
        for given in (config_dict_or_path, config):
            if enabled and given is not None:
                _check_config(given)
        self._enabled = enabled
        self._dtype = dtype
        self._open: OrderedDict[int, nn.Parameter] = OrderedDict()
        """Whole parameters, oldest first, by id."""
        self._open_bytes = 0
        self._taken: list[nn.Parameter] = []
        self._patched: list[tuple[str, Any]] = []
        self._is_outermost = False
        if enabled and not dist.is_initialized():
            init_distributed(verbose=False)
        for name, group in (
            ("data_parallel_group", data_parallel_group),
            ("sequence_data_parallel_group", sequence_data_parallel_group),
            ("zero_param_parallel_group", zero_param_parallel_group),
        ):
            if group is not None and dist.get_world_size(group) != dist.get_world_size():
                raise UserError(
                    f"zero.Init: {name} has {dist.get_world_size(group)} of {dist.get_world_size()} ranks; parameters "
                    "are split over all ranks, leave it out"
                )
        if module is not None and enabled:
            with self:
                for param in module.parameters():
                    self._take(param)

    # ---- the context ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Init:
        global _active
        self._is_outermost = self._enabled and _active is None
        if self._is_outermost:
            _active = self
            self._patch("register_parameter", _registering)
            self._patch("__setattr__", _assigning)
            self._patch("__getattr__", _reading)
            self._patch("_named_members", _iterating)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if not self._is_outermost:
            return
        _active = None
        for name, original in self._patched:
            setattr(nn.Module, name, original)
        self._patched.clear()
        if kind is None:
            self._close(list(self._open.values()))
            if self._dtype is not None:  # not earlier: what is drawn in another dtype are other numbers
                cast(self._taken, self._dtype)
        self._taken.clear()

    def _patch(self, name: str, make: Callable[[Any], Any]) -> None:
        original = nn.Module.__dict__[name]
        self._patched.append((name, original))
        setattr(nn.Module, name, make(original))

    # ---- which parameters are whole -------------------------------------------------------------------------------

    def _take(self, param: nn.Parameter | None) -> None:
        """A module has got a parameter: new, or one that another module has already (tied weights)."""
        if param is None or param.device.type == "meta":
            return
        if find_partition(param) is None:
            track(param)
            self._taken.append(param)
        self._hold(param)

    def _hold(self, param: nn.Parameter) -> None:
        """The parameter is wanted whole now."""
        if find_partition(param) is None:
            return
        if id(param) in self._open:
            self._open.move_to_end(id(param))
            return
        open_whole([param])
        self._open[id(param)] = param
        self._open_bytes += param.nbytes
        while self._open_bytes > OPEN_BYTES and len(self._open) > MIN_OPEN:
            self._close([next(iter(self._open.values()))])

    def _close(self, params: list[nn.Parameter]) -> None:
        for param in params:
            self._open.pop(id(param))
            self._open_bytes -= param.nbytes
        if dist.get_world_size() > 1:
            close_from(params, 0)


def _check_config(given: Any) -> None:
    """Before a model is built for minutes. Not more than its keys: trainers fill others in later."""
    source = read_source(given)
    problems = read_config(source.values, source.name, fillings(None, source.values)).problems
    if problems:
        lines = key_lines(source.text) if source.text is not None else {}
        places = [(line_of(written, lines), text) for written, text in problems]
        raise UserError(
            *(f"{source.name}: {text}" if line is None else f"{source.name}:{line}: {text}" for line, text in places)
        )


# ---- what nn.Module does while a context is active -------------------------------------------------------------------


def _registering(original: Callable[..., None]) -> Callable[..., None]:
    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if _active is not None:
            _active._take(param)

    return register_parameter


def _assigning(original: Callable[..., None]) -> Callable[..., None]:
    def setattr_(self: nn.Module, name: str, value: Any) -> None:
        original(self, name, value)
        # a parameter that replaces one goes past `register_parameter` in some versions of torch
        if _active is not None and isinstance(value, nn.Parameter) and self._parameters.get(name) is value:
            _active._take(value)

    return setattr_


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    def getattr_(self: nn.Module, name: str) -> Any:
        value = original(self, name)
        if _active is not None and isinstance(value, nn.Parameter):
            _active._hold(value)
        return value

    return getattr_


def _iterating(original: Callable[..., Iterator[tuple[str, Any]]]) -> Callable[..., Iterator[tuple[str, Any]]]:
    def named_members(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, value in original(self, *args, **kwargs):
            if _active is not None and isinstance(value, nn.Parameter):
                _active._hold(value)
            yield name, value

    return named_members
