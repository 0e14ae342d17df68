"""The memory plan of a model under a ds_config's settings, as a table; nothing is allocated.

The model is built on the meta device and sharded over ranks that do not exist, so that the numbers are those of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from heavylift.config.deepspeed.settings import Precision, Settings
from heavylift.config.deepspeed.training import OURS
from heavylift.config.schema import ModelConfig, Tier
from heavylift.errors import UserError
from heavylift.memory.activations import LayerShape, Recompute, Workload
from heavylift.memory.machine import MachineMemory, measure
from heavylift.memory.plan import MemoryPlan
from heavylift.memory.planner import ModelPlanner
from heavylift.models.load import build_on_meta, load_hf_config, parameter_counts
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model
from heavylift.units import GIB

_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def memory_table(settings: Settings, model: str, world_size: int, seq: int | None) -> Table:
    """Bytes of one rank and of all, tier by tier, beside what this machine has free (for all ranks).

    `model`: folder with a config.json; `seq`: tokens of the longest sample, for the activations. Raises UserError where
    the folder holds no causal language model.
    """
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise UserError(f"--model: expected a Hugging Face model folder with config.json, got {model}")
    plan, num_params = plan_for(settings, folder, world_size, seq)
    title = f"memory plan: {_count(num_params)} parameters, {world_size} ranks"
    table = Table(title=title, title_justify="left")
    for column in ("tier", "what", "per rank", "all ranks"):
        table.add_column(column, justify="right" if "rank" in column else "left")
    for what, tier, num_bytes in plan.rows():
        table.add_row(tier.value, what, _size(num_bytes), _size(num_bytes * world_size))
    table.add_section()
    for tier, num_bytes in ((Tier.DEVICE, plan.device_bytes), (Tier.HOST, plan.host_bytes)):
        what = "all" if seq is not None or tier is Tier.HOST else "all but activations (--seq counts them)"
        table.add_row(tier.value, Text(what, style="bold"), _size(num_bytes), _size(num_bytes * world_size))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    lines = [_machine(measure(device), plan, world_size)]
    if seq is not None:
        done = "every layer recomputed" if settings.checkpointing.enabled else "nothing recomputed"
        lines.append(f"activations: {settings.batch.micro_batch} rows of {seq} tokens, whole logits, {done}")
    if settings.optimizer is not None and settings.optimizer.name not in OURS.values():
        lines.append(f"optimizer states: counted as AdamW's; {settings.optimizer.name} may keep others")
    table.caption = "\n".join([*lines, *(f"heavylift.{line}" for line in plan.without_effect)])
    table.caption_justify = "left"
    return table


def plan_for(settings: Settings, folder: Path, world_size: int, seq: int | None) -> tuple[MemoryPlan, int]:
    """The plan of one of `world_size` ranks, and the model's number of parameters."""
    dtype = _DTYPES[settings.precision]
    hf_config = load_hf_config(folder, trust_remote_code=False)
    module = build_on_meta(hf_config, ModelConfig(model_name_or_path=str(folder)), dtype)
    num_params, _ = parameter_counts(module)
    with _absent_ranks(world_size):
        sharded = shard_model(module, settings.stage, make_mesh(settings.stage, "cpu"))
        planner = ModelPlanner(sharded, LayerShape.from_config(hf_config), dtype)
        work = _workload(settings, seq) if seq is not None else None
        return planner.plan(_options(settings), work), num_params


def _workload(settings: Settings, seq: int) -> Workload:
    block = settings.checkpointing
    recompute = Recompute.FULL if block.enabled else Recompute.NOTHING
    return Workload(settings.batch.micro_batch, seq, recompute, inputs_on_host=block.cpu_checkpointing)


def _options(settings: Settings) -> TieredOptions:
    return TieredOptions(
        tier=settings.offload.tier,
        ratio=settings.offload.ratio,
        schedule=settings.offload.schedule,
        accumulate=settings.batch.accumulation > 1,
        max_grad_norm=settings.gradient_clipping,
        state_format=settings.state_format,
        gradients_on=settings.offload.gradients_on,
        streamed_share=settings.offload.streamed_share,
    )


@contextmanager
def _absent_ranks(world_size: int) -> Iterator[None]:
    """A process group of `world_size` ranks of which only this one exists, for sharding on the meta device."""
    # torch's own stand-in for planning and tests; it moves no data
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _machine(machine: MachineMemory, plan: MemoryPlan, world_size: int) -> str:
    free = [f"host {_size(machine.host_available_bytes)}"]
    if machine.device_available_bytes is not None:
        free.append(f"device {_size(machine.device_available_bytes)}")
    short = []
    if machine.device_available_bytes is not None and plan.device_bytes > machine.device_available_bytes:
        short.append("the device")
    if plan.host_bytes * world_size > machine.host_available_bytes:
        short.append("the host")
    verdict = f"; too little on {' and '.join(short)}" if short else ""
    return f"free on this machine: {', '.join(free)}{verdict}"


def _size(num_bytes: int) -> str:
    """Bytes in GiB, small ones in MiB."""
    if num_bytes < GIB:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"


def _count(num_params: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if num_params >= unit:
            return f"{num_params / unit:.2f}{name}"
    return f"{num_params:,}"
