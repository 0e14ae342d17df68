"""Saving and loading an engine's training state, and writing its weights for others.

A resumed run goes on bit for bit on the same number of ranks; on another number only the order of sums differs.
Float32 masters are saved for every parameter, so weights too are restored with all their bits, by `load_module_only`
also. All of these are collectives: every rank calls them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from heavylift.api import checkpoint
from heavylift.api.checkpoint_extras import check_client_state, pack_extras
from heavylift.api.checkpoint_opening import open_on_all_ranks
from heavylift.api.checkpoint_states import Shapes, load_states, restore_masters, saved_states, steps_taken
from heavylift.api.engine_state import EngineState
from heavylift.api.module_loading import load_module
from heavylift.api.whole_state import whole_weights
from heavylift.errors import UserError

logger = logging.getLogger(__name__)

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class EngineCheckpoint(EngineState):
    """The part of an engine that writes and reads files."""

    # ---- training state -------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes SAVE_DIR/TAG (default: `global_step<N>`) with everything that training needs to go on. True.

        `client_state`: the script's own numbers, text, tensors, lists and dictionaries; rank 0's are saved. Raises
        UserError for others, for tags that differ between ranks, and for a disk that refuses.
        """
        self.check_alive()
        folder = checkpoint.as_folder("save_checkpoint", save_dir)
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        checkpoint.await_all_ranks("save_checkpoint", self._cpu_group, checkpoint.ARRIVAL_TIMEOUT)
        checkpoint.same_on_all_ranks("save_checkpoint", "tag", tag)
        checkpoint.check_tag("save_checkpoint", tag)
        extras = self._pack_extras(client_state)
        self.settle()
        tensors: dict[str, Any] = {
            f"model.{name}": tensor.detach()
            for name, tensor in self._model_tensors()
            if not (exclude_frozen_parameters and isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
        }
        training: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        training["loss_scaler"] = self.loss_scaler.state_dict()
        training["scalars"] = sorted(self.scalars)
        training["buffers"] = [name for name, t in self._model_tensors() if not isinstance(t, nn.Parameter)]
        if self.optimizer is not None:
            tensors |= saved_states(self.optimizer, self._trained())
            training["steps"] = steps_taken(self.optimizer, self._trained())
        checkpoint.write(folder, tag, tensors, training, extras)
        if save_latest:
            checkpoint.write_latest(folder, tag)
        return True

    def _pack_extras(self, client_state: Any) -> bytes:
        """Rank 0's; nothing on the others. A collective."""
        packed = b""

        def action() -> None:
            nonlocal packed
            scheduler = self.lr_scheduler
            packed = pack_extras(
                {
                    "client_state": check_client_state(client_state),
                    "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
                    "param_groups": self._group_values(),
                }
            )

        checkpoint.on_first_rank(action)
        return packed

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Restores what `save_checkpoint` wrote: of `tag`, else the latest. Returns (its path, the client state).

        (None, {}) where nothing was saved in `load_dir` yet. `load_module_only`: the weights alone. Raises UserError
        for a tag that is not there, on every rank also where only one of them does not find it, for weights of another
        model (with `load_module_strict`), and for damaged files.
        """
        self.check_alive()
        if custom_load_fn is not None:
            raise UserError("load_checkpoint: custom_load_fn is not supported; load into engine.module yourself")
        opened = open_on_all_ranks(load_dir, tag)
        if opened is None:
            if self.global_rank == 0:
                logger.warning("load_checkpoint: nothing was saved in %s yet; training starts anew", load_dir)
            return None, {}
        path, training, extras, shapes = opened.path, opened.training, opened.extras, opened.shapes
        self.zero_grad()
        self.settle()
        self._load_model(path, shapes, load_module_strict)
        if self.optimizer is not None:
            restore_masters(path, shapes, self.optimizer, self._trained())
            if load_optimizer_states and not load_module_only:
                self._load_optimizer(path, shapes, training, extras)
        if load_module_only:
            return str(path), extras["client_state"]
        if load_lr_scheduler_states and self.lr_scheduler is not None and extras["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(extras["lr_scheduler"])
        for name in _COUNTERS:
            setattr(self, name, int(training[name]))
        return str(path), extras["client_state"]

    def _load_optimizer(self, path: Path, shapes: Any, training: dict[str, Any], extras: dict[str, Any]) -> None:
        optimizer = self.needs_optimizer("load_checkpoint")
        if len(extras["param_groups"]) != len(optimizer.param_groups):
            raise UserError(
                f"{path} has {len(extras['param_groups'])} parameter groups, this run "
                f"{len(optimizer.param_groups)}; group them as before, or set load_optimizer_states=False"
            )
        load_states(path, shapes, optimizer, self._trained(), training.get("steps", {}))
        for group, values in zip(optimizer.param_groups, extras["param_groups"], strict=True):
            group.update(values)
        self.loss_scaler.load_state_dict(training["loss_scaler"])
        self.tell_scale()

    def _group_values(self) -> list[dict[str, Any]]:
        """Learning rate and the like of every parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def _load_model(self, path: Path, shapes: Shapes, strict: bool) -> None:
        own = {f"model.{name}": tensor for name, tensor in self._model_tensors()}
        missing = sorted(
            key
            for key, t in own.items()
            if key not in shapes and not (isinstance(t, nn.Parameter) and not t.requires_grad)
        )
        unknown = sorted(key for key in shapes if key.startswith("model.") and key not in own)
        if strict and (missing or unknown):
            lacks, has = [", ".join(k.removeprefix("model.") for k in some[:3]) for some in (missing, unknown)]
            raise UserError(
                f"{path} holds another model: "
                + "; ".join(
                    text
                    for text in (f"it lacks {lacks}" if lacks else "", f"it has {has}, unknown here" if has else "")
                    if text
                )
                + "; build the same model, or set load_module_strict=False"
            )
        if (missing or unknown) and self.global_rank == 0:
            logger.warning(
                "load_checkpoint: %s of this model's %s tensors are in %s, %s there are unknown here",
                len(own.keys() & shapes.keys()),
                len(own),
                path,
                len(unknown),
            )
        targets = {key: tensor.detach() for key, tensor in own.items() if key in shapes}
        for key, tensor in targets.items():
            if tuple(shapes[key].size) != tuple(tensor.shape):
                raise UserError(
                    f"load_checkpoint: {key.removeprefix('model.')} has shape {tuple(shapes[key].size)} in {path}, "
                    f"{tuple(tensor.shape)} in this model"
                )
        checkpoint.read_tensors(path, targets)

    def _model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, each once, and the buffers that belong to a state_dict."""
        yield from self.module.named_parameters()
        kept = self.module.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.module.named_buffers() if name in kept)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    # ---- weights for others ---------------------------------------------------------------------------------------

    def module_state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", exclude_frozen_parameters: bool = False
    ) -> dict[str, Any]:
        """The module's state_dict. Stages 0 to 2: whole tensors, on every rank. Stage 3: DTensors of the shards."""
        self.settle()
        result: dict[str, Any] = {} if destination is None else destination
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        for name, tensor in self.module.state_dict().items():
            if exclude_frozen_parameters and name in frozen:
                continue
            whole = isinstance(tensor, DTensor) and self._sharded.stage < 3
            value = tensor.full_tensor() if whole else tensor
            result[prefix + name] = value.reshape(()) if whole and name in self.scalars else value
        return result

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., None] | None = None,
        fetch_z3_params: bool = False,
    ) -> Any:
        """Writes whole tensors (the same on every rank) or DTensors into the module; the masters follow.

        Float32 values keep all their bits in the masters of 16-bit parameters. Returns the names that were missing and
        unexpected, as `nn.Module.load_state_dict` does. `fetch_z3_params` has no effect: shards are written as they
        are. Raises UserError, and writes nothing, for missing and unknown names (with `strict`), other shapes, and
        between a backward that has taken the step already and step().
        """
        return self._load_module("load_module_state_dict", state_dict, strict, custom_load_fn)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Of the module, as `state_dict()` is; see `load_module_state_dict`. Raises UserError for `assign`."""
        if assign:
            raise UserError("load_state_dict: assign=True would replace the sharded parameters; leave it out")
        return self._load_module("load_state_dict", state_dict, strict)

    def _load_module(self, call: str, state_dict: Mapping[str, Any], strict: bool, custom_load_fn: Any = None) -> Any:
        self.check_alive()
        if custom_load_fn is not None:
            raise UserError(f"{call}: custom_load_fn is not supported; load into engine.module yourself")
        self.settle()
        return load_module(call, self.module, state_dict, strict, self.scalars)

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """All weights whole, in the parameters' dtype, on the CPU of rank 0; None on the others. Tensor by tensor."""
        self.settle()
        weights = whole_weights(self.module, self.scalars, exclude_frozen_parameters)
        return weights if self.global_rank == 0 else None

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights as one file, in the parameters' dtype: safetensors where the name ends so, else torch's.

        False, and a warning, at stage 3 without `stage3_gather_16bit_weights_on_model_save`: rank 0 must then not
        hold the whole model.
        """
        path = checkpoint.as_folder("save_16bit_model", save_dir) / save_filename
        if self._sharded.stage == 3 and not self.settings.gather_16bit_weights_on_save:
            if self.global_rank == 0:
                logger.warning(
                    "save_16bit_model: saved nothing, zero_optimization.stage3_gather_16bit_weights_on_model_save is "
                    "false; set it to true, or use save_checkpoint"
                )
            return False
        state_dict = self.consolidated_state_dict(exclude_frozen_parameters)

        def action() -> None:
            assert state_dict is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            with checkpoint.writing(path) as part:
                if save_filename.endswith(".safetensors"):
                    from safetensors.torch import save_file

                    names = {id(t): name for name, t in reversed(state_dict.items())}  # a tied weight once
                    once = {name: t.contiguous() for name, t in state_dict.items() if names[id(t)] == name}
                    save_file(once, part, metadata={"format": "pt"})
                else:
                    torch.save(state_dict, part)

        checkpoint.on_first_rank(action)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        # the name that Accelerate calls
        return self.consolidated_state_dict(exclude_frozen_parameters)
