"""DeepSpeed's monitors by their classes, over the sinks of `heavylift.monitor`.

    monitor = TensorBoardMonitor(TensorBoardConfig(enabled=True, output_path="runs"))
    monitor.write_events([("Train/loss", 0.5, 128)])

Rank 0 writes; on other ranks, and with `enabled` false, nothing happens. Raises UserError where a sink cannot be
opened or its package is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError

from heavylift.config.deepspeed.keys import Block
from heavylift.config.deepspeed.settings import MonitorSettings
from heavylift.config.deepspeed.training import Comet, CsvMonitor, Tensorboard, Wandb
from heavylift.errors import UserError
from heavylift.monitor.events import Event
from heavylift.monitor.master import MonitorMaster as _Master

TensorBoardConfig, CSVConfig, WandbConfig, CometConfig = Tensorboard, CsvMonitor, Wandb, Comet
_BLOCKS: dict[str, tuple[str, type[Block]]] = {
    "tensorboard": ("tensorboard", Tensorboard),
    "csv_monitor": ("csv", CsvMonitor),
    "wandb": ("wandb", Wandb),
    "comet": ("comet", Comet),
}


class DeepSpeedMonitorConfig:
    """The monitors' blocks of a configuration: `tensorboard`, `csv_monitor`, `wandb`, `comet`."""

    def __init__(self, **blocks: Mapping[str, Any] | Block) -> None:
        unknown = sorted(blocks.keys() - _BLOCKS.keys())
        if unknown:
            raise UserError(f"monitors: expected {', '.join(_BLOCKS)}, got {', '.join(unknown)}")
        self._blocks = {name: _block(name, blocks.get(name, {})) for name in _BLOCKS}
        self.tensorboard, self.csv_monitor = self._blocks["tensorboard"], self._blocks["csv_monitor"]
        self.wandb, self.comet = self._blocks["wandb"], self._blocks["comet"]

    @property
    def enabled(self) -> bool:
        """Whether any monitor is on."""
        return any(_is_on(block) for block in self._blocks.values())

    def settings(self) -> list[MonitorSettings]:
        """Those that are on."""
        return [_settings(name, block) for name, block in self._blocks.items() if _is_on(block)]


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """From a raw ds_config.json."""
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in _BLOCKS if name in param_dict})


class Monitor:
    """Writes events (name, value, x) on rank 0. Base of the classes for one program each."""

    name = ""

    def __init__(self, config: Any) -> None:
        block = _block(self.name, config)
        self.enabled = _is_on(block)
        self._master = _Master([_settings(self.name, block)] if self.enabled else [], _is_first_rank())

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Writes (name, value, samples) on rank 0."""
        self._master.write_events(event_list)
        if flush:
            self._master.flush()


class TensorBoardMonitor(Monitor):
    """TensorBoard."""

    name = "tensorboard"


class WandbMonitor(Monitor):
    """Weights & Biases."""

    name = "wandb"


class CometMonitor(Monitor):
    """Comet."""

    name = "comet"


class csvMonitor(Monitor):
    """CSV files, one for each event's name."""

    name = "csv_monitor"


class MonitorMaster(Monitor):
    """All monitors of a `DeepSpeedMonitorConfig`."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        self.enabled = monitor_config.enabled
        self._master = _Master(monitor_config.settings(), _is_first_rank())


def _block(name: str, given: Any) -> Block:
    _, cls = _BLOCKS[name]
    if isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        raise UserError(f"{name}: expected its block, or a mapping, got {type(given).__name__}")
    try:
        return cls(**given)
    except ValidationError as error:
        raise UserError(
            *(f"{name}.{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors())
        ) from None


def _is_on(block: Block) -> bool:
    return bool(block.model_dump()["enabled"])


def _settings(name: str, block: Block) -> MonitorSettings:
    options = {key: value for key, value in block.model_dump().items() if key != "enabled" and value is not None}
    return MonitorSettings(_BLOCKS[name][0], options)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
