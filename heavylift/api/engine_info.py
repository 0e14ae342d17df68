"""What an engine tells about itself, and the batch sizes that may change during training."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler

from heavylift.api.dataloader import EngineDataLoader, check_dataset
from heavylift.api.engine_state import EngineState
from heavylift.api.process_groups import get_data_parallel_group
from heavylift.config.deepspeed.settings import BatchSizes, Precision
from heavylift.config.deepspeed.zero import OffloadOptimizer
from heavylift.config.schema import Tier
from heavylift.config.words import shown
from heavylift.errors import UserError
from heavylift.offload.optimizer import TieredAdamW


class EngineInfo(EngineState):
    """Getters by the names that DeepSpeed's engine has."""

    # ---- batch sizes ----------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Rows per optimizer step, all ranks."""
        return self._batch.train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows per rank in one forward and backward."""
        return self._batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self._batch.train_batch, self._batch.micro_batch, self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches per step, from the next step on.

        Raises UserError when it is not a whole number of micro-batches, or when the engine was made for one
        micro-batch per step and cannot add gradients up.
        """
        _check_size("set_train_batch_size", train_batch_size)
        rows = self._batch.micro_batch * self.world_size
        if train_batch_size % rows:
            raise UserError(
                f"set_train_batch_size: {train_batch_size} is not a multiple of micro-batch x ranks = "
                f"{self._batch.micro_batch} x {self.world_size} = {rows}"
            )
        accumulation = train_batch_size // rows
        if accumulation > 1 and not self._can_accumulate():
            raise UserError(
                f"set_train_batch_size: {accumulation} micro-batches per step, but this engine was made for one; start "
                "with gradient_accumulation_steps above 1"
            )
        self._batch = BatchSizes(train_batch_size, self._batch.micro_batch, accumulation)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the rows per micro-batch; the micro-batches per step stay. Raises UserError for less than 1."""
        _check_size("set_train_micro_batch_size", micro_batch_size)
        accumulation = self._batch.accumulation
        train_batch = micro_batch_size * accumulation * self.world_size
        self._batch = BatchSizes(train_batch, micro_batch_size, accumulation)

    def _can_accumulate(self) -> bool:
        if not isinstance(self.optimizer, TieredAdamW) or self.optimizer.options.accumulate:
            return True
        return self.precision is Precision.FP32 and not self.optimizer.options.overlapped

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> EngineDataLoader:
        """A dataloader of this rank's micro-batches. `route` other than "train": in the dataset's order."""
        check_dataset("deepspeed_io: dataset", dataset)
        return EngineDataLoader(
            dataset,
            batch_size or self._batch.micro_batch,
            self._ranks,
            collate_fn=collate_fn,
            sampler=data_sampler,
            drop_last=self.settings.dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
            shuffle=route == "train",
            pin_memory=pin_memory,
        )

    # ---- ranks ----------------------------------------------------------------------------------------------------

    @property
    def dp_world_size(self) -> int:
        """Ranks that share the batch: all."""
        return self.world_size

    @property
    def mp_world_size(self) -> int:
        """Ranks that share a layer's arithmetic: there is no model parallelism, so 1."""
        return 1

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The process group of all ranks."""
        return get_data_parallel_group()

    # ---- the optimizer --------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """Learning rate of every parameter group, that of the coming step."""
        return self._from_groups("lr")

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every parameter group, from the coming step on; a scheduler sets it again.

        Raises UserError for what is not a number from 0 on.
        """
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < math.inf:
            raise UserError(f"set_lr: expected a number from 0 on, got {lr!r}")
        for group in self.needs_optimizer("set_lr").param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # optimizers captured in a graph hold on to the tensor
            else:
                group["lr"] = lr

    def get_type(self) -> list[Any]:
        """`type` of every parameter group that has one."""
        return self._from_groups("type")

    def get_mom(self) -> list[Any]:
        """Betas (or momentum) of every parameter group."""
        groups = self.needs_optimizer("get_mom").param_groups
        return self._from_groups("betas" if "betas" in groups[0] else "momentum")

    def _from_groups(self, key: str) -> list[Any]:
        return [group[key] for group in self.needs_optimizer(f"get_{key}").param_groups if key in group]

    def get_global_grad_norm(self) -> float | None:
        """Of the last step's gradients, all ranks, before clipping, without the loss scale; None before one."""
        return None if self.optimizer is None or self.global_steps == 0 else self.optimizer.grad_norm

    def gradient_clipping(self) -> float:
        """The limit of the global norm; 0: none."""
        return self.settings.gradient_clipping

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.stage > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.settings.stage

    def zero_offload_optimizer(self) -> OffloadOptimizer | None:
        """The `offload_optimizer` block in effect, with `device` "cpu"; None where the states lie on the device."""
        offload = self.settings.offload
        if offload.tier is not Tier.HOST:
            return None
        return OffloadOptimizer(device="cpu", ratio=offload.ratio, cpuadam_cores_perc=offload.cores_perc)

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states lie on the host."""
        return self.settings.offload.tier is Tier.HOST

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded: stage 3."""
        return self.settings.stage == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """`stage3_gather_16bit_weights_on_model_save`."""
        return self.settings.gather_16bit_weights_on_save

    # ---- precision ------------------------------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        """Whether parameters are float16."""
        return self.precision is Precision.FP16

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16."""
        return self.precision is Precision.BF16

    def torch_autocast_enabled(self) -> bool:
        """Whether forward runs under torch.autocast."""
        return self.settings.autocast is not None

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.loss_scaler.is_dynamic

    def loss_scale(self) -> float:
        """Of the coming step; 1 without float16."""
        return self.loss_scaler.scale

    def steps_per_print(self) -> int | None:
        """Steps between two lines of progress; None: none are printed."""
        return self.settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether forward, backward and step are timed."""
        return self.settings.wall_clock_breakdown

    def dump_state(self) -> bool:
        """Whether the engine's state is printed at the start."""
        return self.settings.dump_state


def _check_size(what: str, size: Any) -> None:
    if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
        raise UserError(f"{what}: expected a whole number from 1 on, got {shown(size)}")
