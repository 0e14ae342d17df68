"""Where the optimizer states of finetune.py go: the ratio that the host's free memory takes, and whether it all fits.

Bytes are those of heavylift's memory plan, reckoned on the meta device before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from words import SWITCHES

from heavylift.api.initialize import tiered_options
from heavylift.api.prepare import TORCH_DTYPES
from heavylift.config.deepspeed.settings import Settings
from heavylift.config.schema import Recipe, Tier
from heavylift.memory.activations import LayerShape
from heavylift.memory.fit import Setting, highest_ratio, host_room, remedies
from heavylift.memory.machine import MachineMemory
from heavylift.memory.plan import GIB, MemoryPlan, check_plan
from heavylift.memory.planner import ModelPlanner
from heavylift.models.load import build_on_meta
from heavylift.models.loss_head import install_loss_head
from heavylift.ranks import Ranks
from heavylift.sharding import make_mesh, shard_model
from heavylift.train.setup import workload


class Placement:
    """Plans for one model and batch, as its ranks will hold them."""

    def __init__(self, recipe: Recipe, hf_config: Any, settings: Settings, ranks: Ranks, longest: int) -> None:
        """`longest`: positions of the longest sample, padded."""
        dtype = TORCH_DTYPES[settings.precision]
        # a model of its own: the one that is trained is sharded by initialize()
        model = build_on_meta(hf_config, recipe.model, dtype)
        install_loss_head(model, recipe.train.loss_chunk_tokens)
        work = workload(recipe, longest, model, ranks.device)
        sharded = shard_model(model, settings.stage, make_mesh(settings.stage, ranks.device.type))
        self._planner = ModelPlanner(sharded, LayerShape.from_config(hf_config), dtype)
        self._settings = settings
        options = tiered_options(settings, ranks)
        self._setting = Setting(options, replace(work, micro_batch=settings.batch.micro_batch))
        self._local_world_size = ranks.local_world_size

    def plan(self, ratio: float) -> MemoryPlan:
        """Of one rank, with this share of the states on the host."""
        return self._planner.plan(replace(self._setting.options, ratio=ratio), self._setting.work)

    def place(self, machine: MachineMemory, *, fit_ratio: bool) -> tuple[Settings, str | None]:
        """The settings to train with, and what is to be said about them.

        `fit_ratio`: where the host has no room for the ratio of the settings, take the highest that it has room for, in
        hundredths. Raises UserError, saying what would fit, where host or device do not take the plan.
        """
        settings, said = self._settings, None
        asked = settings.offload.ratio
        # without an accelerator the rest of the states would lie in the same memory
        if fit_ratio and settings.offload.tier is Tier.HOST and machine.device_available_bytes is not None:
            if host_room(self.plan(asked), machine, self._local_world_size) < 0:
                highest = highest_ratio(self._planner, self._setting, machine, self._local_world_size)
                ratio = min(asked, int(100 * highest) / 100)
                settings = replace(settings, offload=replace(settings.offload, ratio=ratio))
                said = (
                    f"ratio {ratio:.2f} in place of {asked:.2f}: the host has {machine.host_available_bytes / GIB:.1f} "
                    f"GiB free; {self._host_gib(ratio):.1f} are needed with {ratio:.2f}, {self._host_gib(asked):.1f} "
                    f"with {asked:.2f} (RATIO={asked:.2f} insists on it)"
                )
        options = replace(self._setting.options, ratio=settings.offload.ratio)
        plan = self.plan(settings.offload.ratio)
        check_plan(plan, machine, self._local_world_size, options, lambda: list(self._remedies(machine)))
        return settings, said

    def _host_gib(self, ratio: float) -> float:
        return self.plan(ratio).host_bytes * self._local_world_size / GIB

    def _remedies(self, machine: MachineMemory) -> Iterator[str]:
        for text in remedies(self._planner, self._setting, machine, self._local_world_size):
            pairs = [word.partition("=") for word in text.split()]
            if all(key in SWITCHES for key, _, _ in pairs):
                yield " ".join(
                    SWITCHES[key]
                    if value == "true"
                    else f"{SWITCHES[key]}{' ' if key.startswith('train.') else '='}{value}"
                    for key, _, value in pairs
                )
