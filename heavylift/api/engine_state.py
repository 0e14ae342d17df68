"""What an engine holds, and how it forwards to the module: the base of its aspects (`engine_*.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from heavylift.api.dataloader import EngineDataLoader
from heavylift.api.distributed import cpu_group
from heavylift.api.forward_methods import gathered_around, is_users_method
from heavylift.api.gathered import register_model
from heavylift.api.loss_scale import LossScaler
from heavylift.api.module_loading import accept_whole_tensors
from heavylift.api.part_forward import PartForwards
from heavylift.api.presence import GradientPresence
from heavylift.api.torch_step import TorchStep
from heavylift.config.deepspeed.settings import Precision, Settings
from heavylift.errors import UserError
from heavylift.offload.optimizer import TieredAdamW
from heavylift.ranks import Ranks
from heavylift.sharding import ShardedModel, join_nested_forwards

StepOptimizer = TieredAdamW | TorchStep


class EngineState(nn.Module):
    """The model and everything around it. `module` is the user's model, sharded in place."""

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: StepOptimizer | None,
        lr_scheduler: Any,
        settings: Settings,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        self.module = sharded.module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.settings = settings
        self.config: dict[str, Any] = {}
        """The ds_config.json as it was given; empty where `Settings` were."""
        self.scalars: frozenset[str] = frozenset()
        """Names of parameters that had no dimension before they were sharded."""
        self.loss_scaler = LossScaler(settings.loss_scale)
        if optimizer is not None:
            optimizer.loss_scaler = self.loss_scaler
        self.training_dataloader: EngineDataLoader | None = None
        self.device = ranks.device
        self.global_rank = ranks.rank
        self.local_rank = ranks.local_rank
        self.world_size = ranks.world_size
        self.global_steps = 0
        """Optimizer steps, skipped ones included."""
        self.global_samples = 0
        """Rows of those steps, all ranks."""
        self.micro_steps = 0
        """Calls of step(), on the boundary or not."""
        self.skipped_steps = 0
        """Optimizer steps that were skipped because a gradient was not finite."""
        self.broken_by: str | None = None
        """What an exception has interrupted, where training cannot go on after it."""
        self.is_destroyed = False
        self._sharded = sharded
        register_model(sharded)
        self._ranks = ranks
        self._batch = settings.batch
        self._cpu_group = cpu_group()
        self._presence = GradientPresence(sharded, ranks.device)
        join_nested_forwards(sharded.module)
        self._part_forwards = PartForwards(sharded)
        self._settle_hooks = self._settle_before_state_dicts()

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have, the module may."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
        try:
            value = getattr(module, name)
            return gathered_around(module, name, self.forward_method) if is_users_method(module, value) else value
        except AttributeError:
            raise AttributeError(f"neither the engine nor its module ({type(module).__name__}) has {name!r}") from None

    @property
    def sharded(self) -> ShardedModel:
        """The module with its groups of parameters that are gathered together."""
        return self._sharded

    def settle(self) -> None:
        """Every parameter of the module is its shard again, with the last step's value."""
        self._sharded.reshard()
        if self.optimizer is not None:
            self.optimizer.synchronize()

    def _settle_before_state_dicts(self) -> list[RemovableHandle]:
        """Whoever reads or writes the weights finds them whole: the last step may still be on its way from the host."""

        def settle(*_: Any) -> None:
            self.settle()

        def settle_optimizer(*_: Any) -> None:
            self.optimizer_settle()

        hooks = []
        for module in self.module.modules():  # a part of the model may be saved and loaded alone; FSDP2 reshards it
            hook = settle if module is self.module else settle_optimizer
            hooks += [module.register_state_dict_pre_hook(hook), module.register_load_state_dict_pre_hook(hook)]
            accept_whole_tensors(module)
        return hooks

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own names, as DTensors, of which this rank holds shards; between a forward and its backward
        gathered ones are whole, and a loss may be made of them."""
        self.optimizer_settle()
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def optimizer_settle(self) -> None:
        """Waits for a step under way, and leaves gathered parameters gathered."""
        if self.optimizer is not None:
            self.optimizer.synchronize()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's, as DTensors; see `module_state_dict`."""
        return self.module.state_dict(*args, **kwargs)

    def tell_scale(self) -> None:
        """To the optimizer: gradients carry the loss scale, and the number of ranks that they are a sum over."""
        if self.settings.loss_scale is not None and self.optimizer is not None:
            self.optimizer.set_grad_scale(self.loss_scaler.scale * self.world_size)

    @contextmanager
    def forward_method(self) -> Iterator[None]:
        """Around a call of a method of the module that gathers parameters."""
        self.check_whole()
        self.optimizer_settle()
        with self.recovering():
            yield

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Around a forward: an exception in it must not leave whole parameters behind, stale after the next step."""
        try:
            yield
        except BaseException as error:
            if not self._sharded.recover() or self.has_unreduced_gradients():
                self.broken_by = f"forward, with {type(error).__name__}"
            raise

    def has_unreduced_gradients(self) -> bool:
        """Whether earlier micro-batches of the step have left gradients that are not reduced yet."""
        return False

    def check_whole(self) -> None:
        """Raises UserError where an exception has left the training state uncertain, and after `destroy`."""
        self.check_alive()
        if self.broken_by is not None:
            raise UserError(
                f"engine: it cannot go on after an exception in {self.broken_by}: gradients or parameters of that step "
                "are incomplete; make a new engine, and load a checkpoint"
            )

    def check_alive(self) -> None:
        """Raises UserError after `destroy`."""
        if self.is_destroyed:
            hint = "" if self.optimizer is not None else _EVALUATED_FIRST
            raise UserError(f"engine: destroy() has ended it; make a new one with initialize(){hint}")

    def needs_optimizer(self, what: str) -> StepOptimizer:
        """The optimizer. Raises UserError where there is none."""
        if self.optimizer is None:
            raise UserError(
                f"{what}: there is no optimizer; add an `optimizer` block to the configuration, or pass one to "
                "initialize()"
            )
        return self.optimizer

    @property
    def precision(self) -> Precision:
        """Dtype of the parameters."""
        return self.settings.precision

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Of torch.autocast around forward; None without."""
        autocast = self.settings.autocast
        if autocast is None:
            return None
        return torch.bfloat16 if autocast.dtype is Precision.BF16 else torch.float16


_EVALUATED_FIRST = (
    ". It has no optimizer: where it is the Trainer's, made by evaluate() before train(), set "
    "eval_on_start=True instead"
)
