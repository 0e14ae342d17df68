"""DeepSpeed's memory estimators by their names, computed from the plan that a run here is checked against.

The numbers differ from DeepSpeed's, whose constants (16 or 18 bytes per parameter, half of all again for buffers) are
of its own buffers. Here: bfloat16 parameters and gradients, float32 masters and moments (12 bytes per parameter),
staging, and what one step gathers, see `heavylift.memory.plan`. So `additional_buffer_factor` is 1 by default.
Left out, as there: activations.

Parameters are not offloaded: the rows with `offload_param` are those without.
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from heavylift.api.partition import find_partition
from heavylift.config.schema import Schedule, Tier
from heavylift.config.words import shown
from heavylift.errors import UserError
from heavylift.memory.peak import GroupLoad
from heavylift.memory.plan import MemoryPlan, make_plan
from heavylift.offload.options import TieredOptions
from heavylift.units import GIB

_DTYPE = torch.bfloat16
_LOADED_BYTES = 4
"""Per parameter of a model that every process builds whole, in float32, before it is sharded."""


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int, int]:
    """(bytes of host memory per node, bytes per GPU, bytes of the largest layer when it is gathered).

    `cpu_offload_params` has no effect. Without `zero_init` every process holds the whole model at the start.
    """
    _check_counts(
        total_params=total_params,
        largest_layer_params=largest_layer_params,
        num_gpus_per_node=num_gpus_per_node,
        num_nodes=num_nodes,
    )
    num_gpus = num_gpus_per_node * num_nodes
    plan = _plan(3, total_params, largest_layer_params, num_gpus, cpu_offload)
    cpu = _host_bytes(plan, total_params, largest_layer_params if zero_init else total_params, num_gpus_per_node)
    return int(cpu * additional_buffer_factor), plan.device_bytes, largest_layer_params * _DTYPE.itemsize


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """(bytes of host memory per node, bytes per GPU)."""
    _check_counts(total_params=total_params, num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes)
    num_gpus = num_gpus_per_node * num_nodes
    # nothing is known of the layers: many small ones, of which all are gathered
    plan = _plan(2, total_params, max(1, total_params // 32), num_gpus, cpu_offload)
    cpu = _host_bytes(plan, total_params, total_params, num_gpus_per_node)
    return int(cpu * additional_buffer_factor), plan.device_bytes


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Prints a table for a model, also for one made under `zero.Init` or on the meta device."""
    total, largest = count_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Prints a table for a model of this many parameters."""
    _check_counts(
        total_params=total_params,
        largest_layer_params=largest_layer_params,
        num_gpus_per_node=num_gpus_per_node,
        num_nodes=num_nodes,
    )
    _print_head(total_params, num_gpus_per_node, num_nodes, f", {largest_layer_params / 1e6:.0f}M in the largest layer")
    for offload in (True, False):
        for zero_init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                cpu_offload=offload,
                cpu_offload_params=False,
                zero_init=zero_init,
                additional_buffer_factor=additional_buffer_factor,
            )
            options = f"offload_optimizer={'cpu' if offload else 'none'}, zero_init={int(zero_init)}"
            print(f"{cpu / GIB:10.2f} | {gpu / GIB:10.2f} | {options}")


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Prints a table for a model."""
    total, _ = count_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Prints a table for a model of this many parameters."""
    _check_counts(total_params=total_params, num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes)
    _print_head(total_params, num_gpus_per_node, num_nodes, "")
    for offload in (True, False):
        cpu, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        print(f"{cpu / GIB:10.2f} | {gpu / GIB:10.2f} | offload_optimizer={'cpu' if offload else 'none'}")


def count_params(model: nn.Module) -> tuple[int, int]:
    """(all parameters, those of the module that owns most directly). Tied ones count once, sharded ones whole. Raises
    UserError for anything but a module."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model: expected a torch.nn.Module, got {shown(model)}")
    total, largest = 0, 0
    seen: set[int] = set()
    for module in model.modules():
        own = 0
        for param in module.parameters(recurse=False):
            own += _numel(param)
            if id(param) not in seen:
                seen.add(id(param))
                total += _numel(param)
        largest = max(largest, own)
    return total, largest


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise UserError(f"{name}: expected a whole number ≥ 1, got {shown(value)}")


def _numel(param: torch.Tensor) -> int:
    partition = find_partition(param)
    if partition is not None:
        return partition.shape.numel()
    return param.shape.numel() if isinstance(param, DTensor) else param.numel()


def _plan(stage: int, total: int, largest: int, num_gpus: int, offload: bool) -> MemoryPlan:
    """Per process: as many layers of the largest size as make up the model."""
    largest = max(1, min(largest, total))
    sizes = [largest] * (total // largest)
    sizes += [total % largest] if total % largest else []
    # the first group is the root, which stays gathered: the smallest
    loads = [GroupLoad(f"layer {i}", size, -(-size // num_gpus)) for i, size in enumerate(reversed(sizes))]
    tier = Tier.HOST if offload else Tier.DEVICE
    schedule = Schedule.AUTO if offload else Schedule.SYNCHRONOUS
    shards = sum(load.shard_numel for load in loads)
    return make_plan(
        loads, shards, TieredOptions(tier, schedule=schedule), stage=stage, dtype=_DTYPE, num_shards=num_gpus
    )


def _host_bytes(plan: MemoryPlan, total: int, built_whole: int, num_gpus_per_node: int) -> int:
    """The most of: what training needs, and what building the model needs before that."""
    return num_gpus_per_node * max(plan.host_bytes, _LOADED_BYTES * built_whole)


def _print_head(total_params: int, num_gpus_per_node: int, num_nodes: int, more: str) -> None:
    print(
        "Memory for parameters, gradients and optimizer states, activations excepted\n"
        f"{num_nodes} node{'s' * (num_nodes > 1)} with {num_gpus_per_node} GPU{'s' * (num_gpus_per_node > 1)} each; "
        f"{total_params / 1e6:.0f}M parameters{more}\n"
        "GiB per CPU | per GPU    | options"
    )
