"""Forward, backward and step of an engine, with DeepSpeed's meaning of each.

    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()          # steps the optimizer at the accumulation boundary, else does nothing

The gradient of a step is the mean over ranks and micro-batches: the loss is divided by the number of micro-batches and
of ranks, FSDP2 adds up. With a loss scale (float16) the division by the ranks is left to the step, so that small
gradients are not divided before they are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

from heavylift.api.engine_state import EngineState, StepOptimizer
from heavylift.api.loss_source import LossSource
from heavylift.api.presence import presence_varies
from heavylift.api.reports import EngineReports, StepFacts
from heavylift.config.deepspeed.settings import Precision, Settings
from heavylift.engine import attention_kernels
from heavylift.errors import UserError
from heavylift.offload.optimizer import TieredAdamW
from heavylift.ranks import Ranks
from heavylift.sharding import ShardedModel


class EngineSteps(EngineState):
    """The part of an engine that trains."""

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: StepOptimizer | None,
        lr_scheduler: Any,
        settings: Settings,
        ranks: Ranks,
    ) -> None:
        super().__init__(sharded, optimizer, lr_scheduler, settings, ranks)
        self._boundary: bool | None = None
        """What `set_gradient_accumulation_boundary` has said; None: counted."""
        self._holds_back = False
        """Inside `no_sync`."""
        self._num_backwards = 0
        """Since the last optimizer step."""
        self._step_applied = False
        self._loss_source = LossSource(sharded)
        # Between micro-batches that are not reduced FSDP2 keeps gradients in float32, but new ones in their own dtype,
        # and cannot reduce them together: where some micro-batch may leave a parameter out, each is reduced
        self._reduces_always = sharded.stage > 1 or (
            settings.precision is not Precision.FP32 and presence_varies(sharded)
        )
        self.tell_scale()
        if optimizer is not None:
            optimizer.on_zero_grad = self._forget_micro_batches
        self.reports = EngineReports(settings, sharded.module, ranks.device, ranks.rank)
        self.monitor = self.reports.monitor

    # ---- forward --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, whatever it takes and returns."""
        if self.settings.cast_inputs:
            args, kwargs = tree_map(self._to_half, (args, kwargs))
        autocast = self.autocast_dtype
        cast = nullcontext() if autocast is None else torch.autocast(self.device.type, dtype=autocast)
        told = self.reports.forward(self.global_steps) if torch.is_grad_enabled() else nullcontext()
        self.check_whole()
        with attention_kernels(self.device), cast, told, self.recovering():
            output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            # no backward will: and the next step must not leave stale whole parameters behind
            self._sharded.reshard()
        return output

    def _to_half(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.half() if is_float else value

    # ---- backward -------------------------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any
    ) -> torch.Tensor:
        """Adds this micro-batch's gradients to those of the step. A collective.

        `loss`: a scalar, the mean over the micro-batch. `scale_wrt_gas` false: it is divided by the number of
        micro-batches already. Returns the loss over the number of micro-batches, detached.
        """
        scaled = self._scaled(loss, scale_wrt_gas)
        with attention_kernels(self.device), self.reports.backward():
            try:
                scaled.backward(retain_graph=retain_graph)
            except BaseException as error:
                self.broken_by = f"backward, with {type(error).__name__}"
                if "backward through the graph a second time" in str(error):
                    raise UserError(_SECOND_BACKWARD) from None
                if "got a second gradient" not in str(error):
                    raise
                # two forwards before one backward: layers are reduced twice
                raise UserError(_SECOND_GRADIENT) from None
        divisor = self._batch.accumulation if scale_wrt_gas else 1
        return loss.detach() / divisor

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """For `engine.scale(loss).backward()`: the loss as `backward` would use it. Call once per micro-batch."""
        return self._scaled(loss, scale_wrt_gas=True)

    def _scaled(self, loss: torch.Tensor, scale_wrt_gas: bool) -> torch.Tensor:
        self.needs_optimizer("backward")
        self.check_whole()
        self._check_loss(loss)
        self.reports.saw_loss(loss, 1.0 if scale_wrt_gas else self._batch.accumulation)
        reduces = self._reduces_always or (self.is_gradient_accumulation_boundary() and not self._holds_back)
        self._sharded.set_last_micro_batch(reduces)
        if self._num_backwards and self._takes_one_gradient():
            raise UserError(_SECOND_GRADIENT)
        self._num_backwards += 1
        factor = self.loss_scaler.scale / (self._batch.accumulation if scale_wrt_gas else 1)
        if self.settings.loss_scale is None:
            factor /= self.world_size
        scaled = loss.float() * factor if factor != 1.0 else loss
        return self._presence.watch(scaled, reduces)

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"backward: the loss should be a tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise UserError(f"backward: the loss should be one number, got shape {tuple(loss.shape)}; take its mean")
        if not loss.requires_grad or not self._loss_source.is_behind(loss):
            raise UserError(
                "backward: the loss depends on no trained parameter; run forward with gradients, through engine(...)"
            )

    def has_unreduced_gradients(self) -> bool:
        """Stages 0 and 1 keep them on their rank until the boundary."""
        return self._num_backwards > 0 and not self._reduces_always

    def _takes_one_gradient(self) -> bool:
        options = self.optimizer.options if isinstance(self.optimizer, TieredAdamW) else None
        return options is not None and options.overlapped and not options.accumulate

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing is left to do: backward reduces."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward keeps gradients on their rank (stages 0 and 1). Raises UserError for stages 2 and 3."""
        if self._sharded.stage > 1:
            raise UserError(
                f"no_sync: stage {self._sharded.stage} shards gradients, so every backward reduces them; use "
                "gradient_accumulation_steps, or stage 0 or 1"
            )
        if self._holds_back:
            raise UserError("no_sync: already inside of no_sync")
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """For several backward passes in one micro-batch. Each is reduced as it comes; the sum is the same."""
        yield

    # ---- step -----------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming step() steps the optimizer."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.managed_accumulation:
            return True
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Takes the counting over: says so before forward and backward, for every micro-batch from now on."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the boundary: optimizer step, zero_grad, learning-rate scheduler (not after a skipped step).

        A collective. Elsewhere it only counts. `lr_kwargs` go to the scheduler's step. Raises UserError without a
        backward before it, and when float16 overflows at the smallest loss scale.
        """
        if self._holds_back:
            raise UserError("step: called inside of no_sync, where gradients are not reduced; call it after")
        optimizer = self.needs_optimizer("step")
        self.check_whole()
        self._step_applied = False
        facts = None
        if self.is_gradient_accumulation_boundary():
            if self._num_backwards == 0:
                raise UserError(
                    "step: no backward since the last step; call engine.backward(loss) or engine.scale(loss).backward()"
                )
            self._take_step(optimizer, lr_kwargs or {})
            facts = self._step_facts(optimizer)
        self.micro_steps += 1
        self.reports.micro_step_done(facts)

    def _take_step(self, optimizer: StepOptimizer, lr_kwargs: dict[str, Any]) -> None:
        with self.reports.step():
            self._sharded.reshard()
            optimizer.step()
            self._num_backwards = 0
            optimizer.zero_grad()
        self._step_applied = not optimizer.skipped
        self.global_steps += 1
        self.global_samples += self._batch.train_batch
        self.skipped_steps += optimizer.skipped
        self.loss_scaler.update(optimizer.skipped)
        self.tell_scale()
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def _step_facts(self, optimizer: StepOptimizer) -> StepFacts:
        groups = optimizer.param_groups
        return StepFacts(
            step=self.global_steps,
            num_skipped=self.skipped_steps,
            global_samples=self.global_samples,
            lrs=[float(group["lr"]) for group in groups],
            moms=[group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups],
            loss_scale=None if self.settings.loss_scale is None else self.loss_scaler.scale,
            grad_norm=optimizer.grad_norm,
        )

    def get_wall_clock_timers(self) -> dict[str, float]:
        """What `wall_clock_breakdown` last told: milliseconds of each phase, mean per optimizer step. Rank 0's."""
        return dict(self.reports.breakdown.last_ms)

    def was_step_applied(self) -> bool:
        """Whether the last step() changed the weights: on the boundary, and not skipped."""
        return self._step_applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of all micro-batches since the last step, as the optimizer's `zero_grad` does; there is
        nothing to forget, or to wait for, after step(). Micro-batches are counted on."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _forget_micro_batches(self) -> None:
        """The optimizer forgets its gradients: so do those who have some that are not reduced yet."""
        if self._num_backwards > 0:
            self._num_backwards = 0
            self._presence.forget()
            self._sharded.discard_unreduced()


_SECOND_GRADIENT = (
    "backward: a second gradient in the same step, but the step of offloaded states may begin with the first; set "
    '"managed_gradient_accumulation": false, which adds gradients up until step()'
)


_SECOND_BACKWARD = (
    "backward: a second backward through the same forward, whose activations are freed by now; run forward again, or "
    "give the first one retain_graph=True"
)
