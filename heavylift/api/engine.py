"""The engine that `initialize` returns: its aspects put together, and its end."""

from __future__ import annotations

from typing import Any

from heavylift.api.engine_checkpoint import EngineCheckpoint
from heavylift.api.engine_info import EngineInfo
from heavylift.api.engine_offload import EngineOffload


class Engine(EngineOffload, EngineInfo, EngineCheckpoint):
    """Trains a sharded model: `engine(batch)`, `engine.backward(loss)`, `engine.step()`.

    An `nn.Module` around the user's, which is `engine.module`; what the engine does not have is looked up there.
    """

    def compile(self, backend: str = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Compiles every layer (or the whole module, where it has none that are gathered one by one)."""
        import torch

        layers = [g.module for g in self._sharded.groups if g.module is not self.module] or [self.module]
        for layer in layers:
            # the forward alone: hooks, which gather parameters and wait for them, stay outside
            layer.forward = torch.compile(layer.forward, backend=backend, **(compile_kwargs or {}))

    def empty_partition_cache(self) -> None:
        """Frees gathered parameters."""
        self._sharded.reshard()

    def destroy(self) -> None:
        """Ends the optimizer's threads and frees its memory; the engine cannot train afterwards. Twice is fine."""
        self.is_destroyed = True
        self._presence.close()
        self._part_forwards.close()
        self._loss_source.close()
        for hook in self._settle_hooks:
            hook.remove()
        self.reports.close()
        if self.optimizer is not None:
            self.optimizer.close()
