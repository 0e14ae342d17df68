"""What projects import beside the engine: optimizer classes, estimates, checkpointing, helpers."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.pool import run_on_fresh_ranks, run_on_ranks
from torch import nn

import heavylift
from heavylift.api import activation_checkpointing as checkpointing
from heavylift.api import estimators, logs, optimizers, process_groups, refused
from heavylift.api.accelerator import Accelerator, get_accelerator
from heavylift.api.config_object import DeepSpeedConfig, get_bfloat16_config, get_gradient_clipping, get_log_level
from heavylift.api.monitor_classes import (
    CSVConfig,
    DeepSpeedMonitorConfig,
    MonitorMaster,
    csvMonitor,
    get_monitor_config,
)
from heavylift.api.on_device import OnDevice
from heavylift.api.whole_state import clone_tensors_for_torch_save
from heavylift.errors import UserError
from heavylift.launch.cores import split_cores
from heavylift.offload.optimizer import TieredAdamW

# ---- optimizer classes -----------------------------------------------------------------------------------------------


def trained(make: Any, num_steps: int = 4, decay_lr: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if decay_lr else None
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(7, 6)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach() for p in model.parameters()]


SETTINGS: dict[str, Any] = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3}


@pytest.mark.parametrize("decay_lr", [False, True])
@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (optimizers.FusedAdam, torch.optim.AdamW),
        (optimizers.DeepSpeedCPUAdam, torch.optim.AdamW),
        (lambda p, **k: optimizers.FusedAdam(p, adam_w_mode=False, **k), torch.optim.Adam),
        (lambda p, **k: optimizers.DeepSpeedCPUAdam(p, adamw_mode=False, **k), torch.optim.Adam),
    ],
)
def test_they_step_as_torchs(ours: Any, torchs: Any, decay_lr: bool) -> None:
    mine = trained(lambda p: ours(p, **SETTINGS), decay_lr=decay_lr)
    theirs = trained(lambda p: torchs(p, **SETTINGS), decay_lr=decay_lr)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def overflow_job() -> list[bool]:
    """Whether an optimizer of each kind says that its step was skipped: after a good one, after a bad one."""
    told = []
    for name in ("AdamW", "SGD"):
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": name, "params": {"lr": 0.1}}}
        engine, optimizer, *_ = heavylift.initialize(model=nn.Linear(3, 2), config=config)
        for factor in (1.0, float("inf")):
            engine.backward(engine(torch.ones(2, 3)).sum() * factor)
            engine.step()
            told.append(optimizer.overflow)
        engine.destroy()
    return told


def test_a_skipped_step_is_told_by_the_name_that_accelerate_looks_for() -> None:
    assert run_on_ranks(1, overflow_job) == [[False, True, False, True]]


def names_job(kind: str, offloaded: bool) -> dict[str, Any]:
    """DeepSpeed's names at an engine and its optimizer: float16, an overflow, a learning rate set by hand."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "optimizer": {"type": kind, "params": {"lr": 0.5}},
        "zero_optimization": {
            "stage": 2,
            **({"offload_optimizer": {"device": "cpu", "ratio": 0.5}} if offloaded else {}),
        },
    }
    model = nn.Linear(3, 2)
    engine, optimizer, *_ = heavylift.initialize(model=model, config=config)

    def weights_after(factor: float, lr: float) -> torch.Tensor:
        engine.set_lr(lr)
        engine.backward(engine(torch.ones(2, 3).half()).sum() * factor)
        engine.step()
        return whole_weights(engine)

    start = whole_weights(engine)
    scales = [(optimizer.loss_scale, optimizer.cur_scale, optimizer.loss_scaler.cur_scale)]
    still = weights_after(1.0, 0.0)
    moved = weights_after(1.0, 0.25)
    weights_after(float("inf"), 0.25)
    scales.append((optimizer.loss_scale, optimizer.cur_scale, engine.loss_scaler.loss_scale))
    block = engine.zero_offload_optimizer()
    total = torch.ones(1)
    dist.all_reduce(total, group=engine.data_parallel_group)
    with pytest.raises(UserError, match="set_lr: expected a number from 0 on, got -1"):
        engine.set_lr(-1)
    result = {
        "scales": scales,
        "dynamic": engine.loss_scaler.dynamic,
        "lr": engine.get_lr(),
        "still": torch.equal(start, still),
        "moved_by": (still - moved).flatten().tolist(),
        "ranks": (engine.dp_world_size, engine.mp_world_size, int(total)),
        "block": None if block is None else (block.device, block.ratio),
        "offloads": engine.zero_cpu_offload(),
        "names": {n for n in [*vars(engine), *(n for c in engine_classes() for n in vars(c))] if not n.startswith("_")},
        "torch's names": set(vars(nn.Module())),
    }
    engine.destroy()
    return result


def whole_weights(engine: heavylift.Engine) -> torch.Tensor:
    return heavylift.utils.safe_get_full_fp32_param(engine.module.weight).clone()


def engine_classes() -> list[type]:
    """The engine's classes without torch's."""
    return [c for c in heavylift.Engine.__mro__ if c.__module__.startswith("heavylift.")]


@pytest.mark.parametrize(("kind", "offloaded"), [("SGD", False), ("AdamW", True)])
def test_an_engine_by_deepspeeds_names(kind: str, offloaded: bool) -> None:
    """The learning rate that is set is the one that is used: lr * gradient for SGD, about lr for AdamW."""
    first, second = run_on_ranks(2, names_job, kind, offloaded)
    assert first == second
    assert first["scales"] == [(16.0, 16.0, 16.0), (8.0, 8.0, 8.0)] and first["dynamic"]
    assert first["lr"] == [0.25] and first["still"]
    assert first["moved_by"] == pytest.approx([0.5 if kind == "SGD" else 0.25] * 6, rel=1e-3)
    assert first["ranks"] == (2, 1, 2)
    assert (first["block"], first["offloads"]) == (("cpu", 0.5) if offloaded else None, offloaded)
    page = (Path(__file__).parent.parent / "docs" / "deepspeed_api.md").read_text()
    table = page.partition("## The engine")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)(?:\(\))?`", table.partition("The engine's `optimizer` is")[0]))
    own = "broken_by check_whole forward_method has_unreduced_gradients needs_optimizer optimizer_settle recovering "
    own += "tell_scale scalars check_alive is_destroyed"  # the engine's parts use them among themselves
    assert first["names"] - first["torch's names"] - set(own.split()) - named == set()
    assert named - first["names"] == {"module", "train", "eval"}  # a child, and methods of torch


def test_their_states_are_made_late_and_go_into_a_state_dict() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = optimizers.FusedAdam([param], lr=0.1)
    assert optimizer.state_dict()["state"] == {}
    param.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    other_param = nn.Parameter(param.detach().clone())
    other = optimizers.FusedAdam([other_param], lr=0.5)
    other.load_state_dict(saved)
    for p, o in ((param, optimizer), (other_param, other)):
        p.grad = torch.full((3,), 0.5)
        o.step()
    assert torch.equal(param, other_param)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_cpu_steps_with_the_cores_of_its_rank() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = optimizers.DeepSpeedCPUAdam([param])
    optimizer.step()
    assert isinstance(optimizer._inner, TieredAdamW)
    cores = split_cores(0, 1)
    assert (optimizer._inner.options.num_threads, optimizer._inner.options.cpu_ids) == (len(cores), tuple(cores))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optimizers.FusedAdam(p, amsgrad=True), "FusedAdam: amsgrad is not supported"),
        (
            lambda p: optimizers.FusedAdam(p, bias_correction=False, adam_w_mode=False, weight_decay=0.1).step(),
            "bias_correction=False is there with decoupled weight decay only",
        ),
        (
            lambda p: optimizers.DeepSpeedCPUAdam(p, fp32_optimizer_states=False),
            "fp32_optimizer_states=False is not there",
        ),
        (lambda p: optimizers.FusedAdam(p, lr=-1), "parameter group 0: lr should be at least 0, got -1"),
        (lambda p: optimizers.FusedAdam(p, lr="x"), "lr should be at least 0, got 'x'"),
        (lambda p: optimizers.DeepSpeedCPUAdam(p, lr=None), "lr should be at least 0, got None"),
        (lambda p: optimizers.DeepSpeedCPUAdam(p, eps=-1), "eps should be at least 0, got -1"),
        (lambda p: optimizers.FusedAdam(p, betas=(0.9,)), "betas should be two numbers, at least 0 and below 1, got"),
        (lambda p: optimizers.FusedAdam([{"params": p, "betas": 0.9}]), "betas should be two numbers"),
        (optimizers.DeepSpeedCPULion, "DeepSpeedCPULion is not supported; use FusedAdam"),
        (optimizers.DeepSpeedCPUAdagrad, "use torch.optim.Adagrad without offload"),
        (optimizers.FusedLamb, "FusedLamb is not supported"),
        (refused.PipelineModule, "PipelineModule: pipeline parallelism is not supported; train the plain module"),
        (refused.MoE, "expert parallelism is not supported"),
        (refused.init_inference, "init_inference: inference engines are not supported"),
        (refused.tp_model_init, "tensor parallelism is not supported"),
    ],
)
def test_what_is_refused_says_what_to_use(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make([nn.Parameter(torch.ones(1))])


# ---- estimates -------------------------------------------------------------------------------------------------------


def test_estimates_are_those_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 8 layers of 1M on 4 GPUs."""
    million = 10**6
    cpu, gpu, largest = estimators.estimate_zero3_model_states_mem_needs(8 * million, million, 4, 1)
    assert largest == 2 * million
    assert cpu >= 12 * 8 * million  # float32 master and moments of all parameters
    assert cpu < 16 * 8 * million + 4 * 2**20
    assert gpu >= 2 * 2 * million  # bfloat16 parameters, sharded, beside what is gathered
    whole_cpu, _, _ = estimators.estimate_zero3_model_states_mem_needs(8 * million, million, 4, 1, zero_init=False)
    assert whole_cpu == 4 * 4 * 8 * million  # each of 4 processes builds the model in float32
    _, on_device, _ = estimators.estimate_zero3_model_states_mem_needs(8 * million, million, 4, 1, cpu_offload=False)
    # the gradients of states on the host leave the device in backward; those of the device's own wait for the step
    assert 12 * 8 * million // 4 <= on_device - gpu <= (12 + 2) * 8 * million // 4
    doubled, _, _ = estimators.estimate_zero3_model_states_mem_needs(
        8 * million, million, 4, 1, additional_buffer_factor=2
    )
    assert doubled == 2 * cpu
    cpu2, gpu2 = estimators.estimate_zero2_model_states_mem_needs(8 * million, 4, 1)
    assert gpu2 > 2 * 8 * million and cpu2 >= 12 * 8 * million
    estimators.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000), 2)
    estimators.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(1000, 1000), 1, 2)
    printed = capsys.readouterr().out
    assert "1 node with 2 GPUs each; 1M parameters, 1M in the largest layer" in printed
    assert "2 nodes with 1 GPU each" in printed
    assert printed.count("offload_optimizer=cpu") == 3 and printed.count("offload_optimizer=none") == 3


@pytest.mark.parametrize(
    ("estimate", "message"),
    [
        (
            lambda: estimators.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(2, 2), num_gpus_per_node=0),
            "num_gpus_per_node: expected a whole number ≥ 1, got 0",
        ),
        (lambda: estimators.estimate_zero2_model_states_mem_needs_all_cold(10, 1, 0), "num_nodes: expected a whole"),
        (lambda: estimators.estimate_zero3_model_states_mem_needs(-1, 1), "total_params: expected a whole number ≥ 1"),
        (lambda: estimators.estimate_zero2_model_states_mem_needs("8B"), "total_params: expected .* got '8B'"),
        (lambda: estimators.estimate_zero3_model_states_mem_needs_all_live(3), "model: expected a torch.nn.Module"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(estimate: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=message):
        estimate()
    assert capsys.readouterr().out == "", "no half of a table"


def test_parameters_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert estimators.count_params(model) == (20, 20)
    with torch.device("meta"):
        assert estimators.count_params(nn.Linear(3, 2)) == (8, 8)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_cpu", [False, True])
def test_checkpointing_recomputes_the_same(in_cpu: bool) -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
    calls = []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    results = []
    checkpointing.configure(None, checkpoint_in_cpu=in_cpu)
    assert checkpointing.is_configured()
    for recompute in (False, True):
        torch.manual_seed(0)
        x = torch.randn(5, 8, requires_grad=True)
        y = checkpointing.checkpoint(layer, x) if recompute else layer(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, layer[0].weight.grad.clone()))
        layer.zero_grad()
    assert len(calls) == 3
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpointing_is_configured_by_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"activation_checkpointing": {"cpu_checkpointing": true}}')
    checkpointing.configure(None, deepspeed_config=str(path))
    assert checkpointing._state.in_cpu
    with caplog.at_level(logging.WARNING):
        checkpointing.configure(None, {"activation_checkpointing": {}}, partition_activations=True)
    assert "partition_activations has no effect: there is no model parallelism" in caplog.text
    assert not checkpointing._state.in_cpu
    with pytest.raises(UserError, match="cpu_checkpointing: expected true or false, got 'yes'"):
        checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpointing": "yes"}})
    checkpointing.reset()


# ---- small helpers ---------------------------------------------------------------------------------------------------


def test_modules_are_built_on_a_device_in_a_dtype() -> None:
    with OnDevice(torch.float16, "meta"):
        layer = nn.Linear(3, 2)
    assert layer.weight.is_meta and layer.weight.dtype == torch.float16
    assert nn.Linear(3, 2).weight.dtype == torch.float32
    with OnDevice(torch.float16, "meta", enabled=False):
        assert not nn.Linear(3, 2).weight.is_meta


def test_the_accelerator_of_a_machine_without_gpu() -> None:
    cpu = Accelerator("cpu")
    assert get_accelerator() is get_accelerator()
    assert (cpu.device_name(3), cpu.current_device_name(), cpu.communication_backend_name()) == ("cpu", "cpu", "gloo")
    assert torch.zeros(1, device=cpu.device_name()).device.type == "cpu" and cpu.on_accelerator(torch.zeros(1))
    state = cpu.get_rng_state()
    first = torch.rand(2)
    cpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(2))
    assert 0 < cpu.memory_allocated() < cpu.total_memory() and 0 < cpu.available_memory() <= cpu.total_memory()
    with cpu.stream(cpu.current_stream()), cpu.device(0):
        cpu.synchronize()
        cpu.empty_cache()
        cpu.range_push("x")
        cpu.range_pop()
    assert torch.bfloat16 in cpu.supported_dtypes() and cpu.device_count() == 1


def test_log_levels(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_log_level_from_string("warning")
    assert logs.get_current_level() == logging.WARNING and not logs.should_log_le("info")
    logs.set_log_level_from_string("info")
    with pytest.raises(UserError, match="expected one of debug, info"):
        logs.set_log_level_from_string("loud")
    logs.print_rank_0("once")
    assert capsys.readouterr().out == "once\n"


def test_tensors_are_cloned_for_saving() -> None:
    shared = torch.arange(6.0)
    state = {"a": shared, "b": [shared, (shared[:2], "text")], "n": 3}
    cloned = clone_tensors_for_torch_save(state)
    assert cloned["a"] is cloned["b"][0] and cloned["a"] is not shared
    assert torch.equal(cloned["b"][1][0], shared[:2]) and cloned["b"][1][1] == "text" and cloned["n"] == 3
    assert cloned["b"][1][0].untyped_storage().nbytes() == 8  # not the whole of what it was a view of


def groups_job() -> tuple[int, int, int, int]:
    alone = process_groups.get_local_group()
    assert process_groups.get_local_group() is alone
    total = torch.ones(1)
    dist.all_reduce(total, group=process_groups.get_data_parallel_group())
    world = process_groups.get_data_parallel_world_size()
    return int(total), dist.get_world_size(alone), process_groups.get_data_parallel_rank(), world


def second_world_job() -> list[int]:
    """The group of this rank only, of a default group and of the one after it."""
    found = []
    for _ in range(2):
        alone = process_groups.get_local_group()
        total = torch.ones(1)
        dist.all_reduce(total, group=alone)
        found.append(int(total) * dist.get_world_size(alone))
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_a_group_of_one_does_not_outlive_the_default_group() -> None:
    assert run_on_fresh_ranks(1, second_world_job) == [[1, 1]]


def test_process_groups() -> None:
    assert run_on_ranks(2, groups_job) == [(2, 1, 0, 2), (2, 1, 1, 2)]


def test_a_configuration_as_an_object(tmp_path: Path) -> None:
    raw = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}, "log_level": "info"}
    config = DeepSpeedConfig(raw)
    assert (config.train_micro_batch_size_per_gpu, config.zero_enabled) == (2, False)
    assert config.bfloat16_config["enabled"] and not config.float16_config["enabled"]
    assert (get_gradient_clipping(raw), get_log_level(raw)) == (1.0, "info")
    assert get_bfloat16_config(raw).enabled
    with pytest.raises(UserError):
        DeepSpeedConfig({"train_batch_size": -1})


def test_monitors_by_class(tmp_path: Path) -> None:
    raw = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}, "train_batch_size": 1}
    config = get_monitor_config(raw)
    assert config.enabled and not config.wandb.enabled and config.csv_monitor.job_name == "job"
    MonitorMaster(config).write_events([("Train/loss", 0.5, 16)])
    csvMonitor(CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job")).write_events([("Train/loss", 1, 32)])
    csvMonitor({"enabled": False}).write_events([("Train/loss", 2.0, 48)])
    (file,) = (tmp_path / "job").glob("*.csv")
    assert [line.split(",")[0] for line in file.read_text().splitlines()[1:]] == ["16", "32"]
    with pytest.raises(UserError, match="got nonsense"):
        DeepSpeedMonitorConfig(nonsense={})
    with pytest.raises(UserError, match="csv_monitor.job_nam"):
        csvMonitor({"job_nam": "x"})
