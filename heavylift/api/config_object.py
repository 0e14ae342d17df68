"""`DeepSpeedConfig`: a configuration as an object, for scripts that read it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heavylift.config.deepspeed.parse import load_settings
from heavylift.config.deepspeed.settings import Precision
from heavylift.config.deepspeed.sources import read_source
from heavylift.ranks import Ranks

CLIPPING_DEFAULT = 1.0


class DeepSpeedConfig:
    """A ds_config.json (mapping, path or base64), read and checked. Raises UserError for what is wrong with it.

    `settings` is all of it as heavylift understands it; the attributes are those that scripts use most.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = read_source(config).values
        self.settings = load_settings(config, Ranks.here().world_size)
        batch = self.settings.batch
        self.train_batch_size = batch.train_batch
        self.train_micro_batch_size_per_gpu = batch.micro_batch
        self.gradient_accumulation_steps = batch.accumulation
        self.gradient_clipping = self.settings.gradient_clipping
        self.zero_optimization_stage = self.settings.stage
        self.zero_enabled = self.settings.stage > 0
        self.float16_config = {"enabled": self.settings.precision is Precision.FP16}
        self.bfloat16_config = {"enabled": self.settings.precision is Precision.BF16}
        self.steps_per_print = self.settings.steps_per_print
        self.optimizer_name = None if self.settings.optimizer is None else self.settings.optimizer.name
        self.scheduler_name = None if self.settings.scheduler is None else self.settings.scheduler.name

    def print(self, name: str = "DeepSpeedConfig") -> None:
        """Prints the settings."""
        print(f"{name}: {self.settings}", flush=True)


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """`gradient_clipping` of a raw configuration, or its default."""
    return param_dict.get("gradient_clipping", CLIPPING_DEFAULT)


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """`log_level` of a raw configuration."""
    return param_dict.get("log_level")


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Any:
    """The `bf16` block of a raw configuration (or `bfloat16`), with its defaults."""
    from heavylift.config.deepspeed.precision import Bf16

    return Bf16(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))
