"""FlopsProfiler: what a forward pass costs, module by module, in FLOPs, parameters and time.

FLOPs are counted where PyTorch runs its operators (`torch.utils.flop_counter`), so any model can be profiled, whatever
its code looks like: products of matrices, convolutions, attention, recurrent layers. Work element by element
(activations, norms) is not counted, so totals are a little below those of profilers that add it. A causal mask saves
nothing in the count. Everything is of this process: under FSDP2 each one computes its own samples with whole weights,
and sharded parameters count whole. Left out: the backward pass, which the report estimates as twice the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from heavylift.api.flops_ops import more_operators
from heavylift.api.flops_report import EngineFacts, ModuleCost, ProfileReport
from heavylift.api.flops_text import duration_to_string, flops_to_string, macs_to_string, params_to_string
from heavylift.api.timers import Mark, elapsed_ms, mark_now
from heavylift.errors import UserError


class ProfiledEngine(Protocol):
    """What the report says about an engine."""

    world_size: int

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows per rank in one forward."""

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""


@dataclass
class _Call:
    """A forward that is running."""

    module: nn.Module
    flops_before: int
    start: Mark


@dataclass
class _Found:
    """What was found about one module."""

    has_run: bool = False
    flops: int = 0
    times: list[tuple[Mark, Mark]] = field(default_factory=list)


class FlopsProfiler:
    """Profiles `model` between `start_profile` and `stop_profile`; the results stay until `end_profile`.

    `ds_engine`: an engine whose sizes the report tells. `recompute_fwd_factor`: forwards that backward computes again
    (1 with full activation checkpointing), for the report's estimate of a whole step.
    """

    def __init__(
        self, model: nn.Module, ds_engine: ProfiledEngine | None = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._handles: list[RemovableHandle] = []
        self._found: dict[nn.Module, _Found] = {}
        self._calls: list[_Call] = []
        self._ignored_flops = 0
        self._mha_fastpath = True
        self._eagerly = ExitStack()

    # ---- measuring ------------------------------------------------------------------------------------------------

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begins, with everything at zero; forwards of `ignore_list`'s module classes are not counted."""
        self.stop_profile()
        self.reset_profile()
        self.started = True
        # one fused operator otherwise, whose inside nobody counts
        self._mha_fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        # compiled layers run as they are written: inside of a graph nobody counts, and one without breaks would not run
        self._eagerly.enter_context(torch.compiler.set_stance("force_eager"))
        self._counter = FlopCounterMode(display=False, custom_mapping=more_operators())
        self._counter.__enter__()
        ignored = tuple(ignore_list or ())
        for module in self.model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            hook = self._leave_ignored if isinstance(module, ignored) else self._leave
            # also after an exception: the next forward begins with an empty stack
            self._handles.append(module.register_forward_hook(hook, always_call=True))

    def stop_profile(self) -> None:
        """Ends the measuring; the results stay. Does nothing if none is running."""
        if self._counter is None:
            return
        self._counter.__exit__(None, None, None)
        self._counter = None
        torch.backends.mha.set_fastpath_enabled(self._mha_fastpath)
        self._eagerly.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()

    def reset_profile(self) -> None:
        """Forgets the results."""
        self._found = {module: _Found() for module in self.model.modules()}
        self._calls.clear()
        # what a running counter has counted is taken off
        self._ignored_flops = self._counter.get_total_flops() if self._counter is not None else 0

    def end_profile(self) -> None:
        """Ends the measuring and forgets the results."""
        self.stop_profile()
        self._found.clear()
        self.started = False

    def _counted(self) -> int:
        assert self._counter is not None, "a hook outlived its profile"
        return self._counter.get_total_flops() - self._ignored_flops

    def _enter(self, module: nn.Module, args: Any) -> None:
        # a layer that runs outside of the model's forward is being recomputed in backward: not part of the forward
        if self._calls or module is self.model:
            self._calls.append(_Call(module, self._counted(), mark_now(_device_of(self.model))))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._pop(module)
        if call is not None:
            found = self._found[module]
            found.has_run = True
            found.flops += self._counted() - call.flops_before
            found.times.append((call.start, mark_now(_device_of(self.model))))

    def _leave_ignored(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._pop(module)
        if call is not None:
            self._found[module].has_run = True
            self._ignored_flops += self._counted() - call.flops_before

    def _pop(self, module: nn.Module) -> _Call | None:
        if not any(call.module is module for call in self._calls):
            return None
        # after an exception calls of submodules may be left above this one
        while (call := self._calls.pop()).module is not module:
            pass
        return call

    # ---- results --------------------------------------------------------------------------------------------------

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """FLOPs of the model's forwards since the start."""
        flops = self._of(self.model).flops
        return flops_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulates, half the FLOPs."""
        macs = self._of(self.model).flops // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds that the model's forwards took; on CUDA waits for the device. The counting itself slows them."""
        duration = self._duration_s(self.model)
        return duration_to_string(duration) if as_string else duration

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters of the model, each once; of sharded ones the whole."""
        params = count_params(self.model)
        return params_to_string(params) if as_string else params

    def _of(self, module: nn.Module) -> _Found:
        if module not in self._found:
            raise UserError("flops profiler: nothing is profiled; call start_profile() and run a forward first")
        return self._found[module]

    def _duration_s(self, module: nn.Module) -> float:
        return sum(elapsed_ms(start, end) for start, end in self._of(module).times) / 1000

    def _cost(self, module: nn.Module) -> tuple[int, float]:
        """(FLOPs, seconds); of a list of modules, which has no forward of its own, the sum of those in it."""
        found = self._of(module)
        if found.has_run or module is self.model:
            return found.flops, self._duration_s(module)
        parts = [self._cost(child) for child in module.children()]
        return sum(flops for flops, _ in parts), sum(duration_s for _, duration_s in parts)

    def costs(self) -> list[ModuleCost]:
        """The cost of every module, the model first, then in the order of `named_modules`."""
        costs = {module: self._cost(module) for module in self.model.modules()}
        return [
            ModuleCost(
                name=name,
                kind=type(module).__name__,
                depth=name.count(".") + 1 if name else 0,
                num_params=count_params(module),
                flops=costs[module][0],
                duration_s=costs[module][1],
            )
            for name, module in self.model.named_modules()
        ]

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
    ) -> None:
        """Prints the report, or writes it to `output_file`. Nothing where nothing was started.

        `module_depth`: how deep modules are told (0: the model only, -1: all); `top_modules`: how many of each depth
        are named in the summary; `detailed`: every module too. Raises UserError where the file cannot be written.
        """
        if not self.started:
            return
        engine = None
        if self.ds_engine is not None:
            engine = EngineFacts(
                self.ds_engine.world_size,
                self.ds_engine.train_micro_batch_size_per_gpu(),
                self.ds_engine.gradient_accumulation_steps(),
            )
        report = ProfileReport(self.costs(), profile_step, self.recompute_fwd_factor, engine)
        text = report.text(module_depth=module_depth, top_modules=top_modules, detailed=detailed)
        if not output_file:
            print(text, flush=True)
            return
        path = Path(output_file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"flops_profiler.output_file: {path} cannot be written: {error.strerror}; change the path"
            ) from None


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def count_params(module: nn.Module) -> int:
    """Parameters of the module and all in it, shared ones once; of sharded ones (DTensor) the whole."""
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _as_in_inference(model: nn.Module) -> Iterator[None]:
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in was_training.items():
            module.training = training


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[int | str, int | str, int | str]:
    """(FLOPs, MACs, parameters) of one inference, as numbers or, with `as_string`, with units.

    The model is called with `args` and `kwargs`, or with ones of `input_shape` in its own dtype, after `warm_up` calls
    that do not count. `mode` "generate" calls `model.generate`. Raises UserError where there is nothing to call it
    with, and for another mode.
    """
    if mode not in ("forward", "generate"):
        raise UserError(f"get_model_profile: mode: expected forward or generate, got {mode!r}")
    if input_shape is not None and not (isinstance(input_shape, tuple) and input_shape):
        raise UserError(f"get_model_profile: input_shape: expected a tuple of sizes, got {input_shape!r}")
    if input_shape is None and not args and not kwargs:
        raise UserError("get_model_profile: give input_shape, or args and kwargs, to call the model with")
    if input_shape is not None:
        parameter = next(model.parameters(), torch.empty(0))
        args = (torch.ones(input_shape, dtype=parameter.dtype, device=parameter.device), *args)
    call: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    with _as_in_inference(model):
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))
        profiler.start_profile(ignore_list=ignore_modules)
        try:
            call(*args, **(kwargs or {}))
            profiler.stop_profile()
            found = (
                profiler.get_total_flops(as_string),
                profiler.get_total_macs(as_string),
                profiler.get_total_params(as_string),
            )
            if print_profile:
                profiler.print_model_profile(
                    module_depth=module_depth, top_modules=top_modules, detailed=detailed, output_file=output_file
                )
        finally:
            profiler.end_profile()
    return found
