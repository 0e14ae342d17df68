"""The device's peak: estimated from shapes, beside what was measured; and plans that fit a machine or do not.

Formulas are in `heavylift/memory/activations.py` and `peak.py`; measured peaks in `benchmarks/results`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import GIB, LLAMA_8B, ShapePlanner, llama_8b
from ranks.llamas import llama_config
from ranks.pool import run_on_ranks

from heavylift.config.schema import ModelConfig, Schedule, Tier
from heavylift.errors import UserError
from heavylift.memory.activations import (
    LayerShape,
    Recompute,
    Workload,
    backward_bytes,
    input_bytes,
    kept_bytes,
    loss_bytes,
    saved_bytes,
)
from heavylift.memory.machine import MachineMemory
from heavylift.memory.peak import GroupLoad, Peak, find_peak
from heavylift.memory.plan import MemoryPlan, check_left, check_plan, host_floor_bytes, make_plan
from heavylift.models.load import build_on_meta, load_hf_config
from heavylift.models.loss_head import install_loss_head
from heavylift.offload.options import TieredOptions
from heavylift.offload.overlap import MAX_COPYING
from heavylift.offload.staging import NUM_SLOTS, PIECE_NUMEL

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MEASURED = Workload(4, 4096, Recompute.FULL, chunk_tokens=512, compiled=True)
WHOLE_LOGITS = replace(MEASURED, chunk_tokens=0)


def measured_gib(file: str, case: str) -> float:
    """Peak allocated device memory of a committed measurement on 2 x H200."""
    found = json.loads((RESULTS / file).read_text())
    if "calls" in found:
        return float(found["calls"][-1]["variants"][case]["peak_device_gib"])
    if "cases" in found:
        return float(found["cases"][case]["peak_device_gib"])
    return max(step["mem_device_gib"] for step in found["runs"][case]["steps"])


COMPARISON, SCHEDULES = "llama_3_1_8b_2xh200_comparison.json", "llama_3_1_8b_2xh200_schedules.json"
VARIANTS = "llama_3_1_8b_2xh200_variants.json"


@pytest.mark.parametrize(
    ("file", "case", "work", "ratio"),
    [
        (COMPARISON, "heavylift-device", MEASURED, 0.0),
        (VARIANTS, "0:fp32:speculative", MEASURED, 0.9),
        (SCHEDULES, "device, whole logits, checkpoint outside compile", WHOLE_LOGITS, 0.0),
        (SCHEDULES, "host 0.9 synchronous", WHOLE_LOGITS, 0.9),
    ],
)
def test_the_estimate_is_near_what_was_measured_and_not_below(
    file: str, case: str, work: Workload, ratio: float
) -> None:
    schedule = Schedule.SYNCHRONOUS if case.endswith("synchronous") else Schedule.AUTO
    plan = llama_8b(2).plan(TieredOptions(tier=Tier.HOST, ratio=ratio, schedule=schedule), work)
    assert 1.0 <= plan.device_bytes / GIB / measured_gib(file, case) <= 1.07


def test_staging_is_what_was_measured() -> None:
    """Page-locked bytes are exact: nothing is estimated there."""
    options = TieredOptions(tier=Tier.HOST, ratio=0.9, schedule=Schedule.AUTO)
    plan = llama_8b(2).plan(options, MEASURED)
    found = json.loads((RESULTS / COMPARISON).read_text())["cases"]["heavylift-host90-calm"]["pinned_gib"]
    # then the ring had two places for the parameters of the largest group, embedding or head, now it has a few pieces
    largest = 128256 * 4096 // 2
    size = options.ring_size([largest], [], torch.bfloat16)
    assert size is not None and size.num_bytes == NUM_SLOTS * PIECE_NUMEL * 2
    assert 2 * (plan.pinned_bytes - size.num_bytes + 2 * largest * 2) / GIB == pytest.approx(found, rel=1e-4)


# ---- activations ----------------------------------------------------------------------------------------------------

SHAPE = LayerShape(2, 64, 64, 32, 176, 8, 96)


def build_layer(dtype: torch.dtype, attention: str) -> tuple[torch.nn.Module, Any]:
    """One Llama layer of `SHAPE` and its rotary embedding."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    more = {"attn_implementation": attention}
    config = llama_config(SHAPE.vocab, SHAPE.hidden, SHAPE.mlp_width, SHAPE.num_layers, SHAPE.num_heads, 4, **more)
    assert LayerShape.from_config(config) == SHAPE
    return LlamaDecoderLayer(config, 0).to(dtype), LlamaRotaryEmbedding(config)


def saved_by_autograd(dtype: torch.dtype, attention: str, micro_batch: int, seq: int) -> int:
    """Bytes of the storages that a real layer's forward saves: weights, input and shared tables not counted."""
    layer, rotary = build_layer(dtype, attention)
    hidden = torch.randn(micro_batch, seq, SHAPE.hidden, dtype=dtype, requires_grad=True)
    tables = rotary(hidden, torch.arange(seq)[None])
    mask = torch.zeros(1, 1, seq, seq, dtype=dtype).masked_fill_(torch.ones(seq, seq).triu(1).bool(), -1e9)
    given = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *tables, mask)}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(hidden, position_embeddings=tables, attention_mask=mask if attention == "eager" else None)
        output = output[0] if isinstance(output, tuple) else output
        total = sum(found.values())  # while the graph is alive: addresses are not given out twice
    assert output.requires_grad
    return total


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_eager_layer_saves(dtype: torch.dtype, attention: str) -> None:
    work = Workload(2, 128, eager_attention=attention == "eager")
    estimate = saved_bytes(SHAPE, work, dtype.itemsize)
    found = saved_by_autograd(dtype, attention, 2, 128)
    assert 0.97 * found <= estimate <= 1.25 * found, (estimate, found)


def test_bytes_by_hand() -> None:
    """2 x 8 tokens, bfloat16."""
    work, tokens = Workload(2, 8, compiled=True), 16
    assert input_bytes(SHAPE, work, 2) == tokens * 64 * 2
    compiled = tokens * 2 * (2 * 64 + 2 * 64 + 2 * 32 + 2 * 176)
    assert saved_bytes(SHAPE, work, 2) == compiled
    eager = tokens * (2 * (4 * 64 + 4 * 64) + 2 * (2 * 64 + 2 * 32 + 4 * 176))
    assert saved_bytes(SHAPE, replace(work, compiled=False), 2) == eager
    gradients = tokens * 2 * (5 * 176 + 3 * 64)
    assert backward_bytes(SHAPE, work, 2, 0) == gradients

    full = replace(work, recompute=Recompute.FULL, recompute_every=2)
    assert [kept_bytes(SHAPE, full, 2, layer) for layer in (0, 1, 2)] == [tokens * 128, compiled, tokens * 128]
    assert [backward_bytes(SHAPE, full, 2, layer) for layer in (0, 1)] == [gradients + compiled, gradients]
    on_host = replace(full, inputs_on_host=True)
    assert kept_bytes(SHAPE, on_host, 2, 0) == 0
    assert backward_bytes(SHAPE, on_host, 2, 0) == gradients + compiled + 2 * tokens * 128
    selective = replace(work, recompute=Recompute.SELECTIVE)
    assert kept_bytes(SHAPE, selective, 2, 0) == tokens * 2 * (3 * 64 + 2 * 64 + 2 * 32 + 2 * 176)

    norm = tokens * 64 * (4 + 3 * 2)
    assert loss_bytes(SHAPE, work, 2) == norm + 3 * 4 * tokens * 96
    chunked = norm + 6 * 96 * 64 + 10 * tokens * 64 + 3 * 4 * 5 * 96
    assert loss_bytes(SHAPE, replace(work, chunk_tokens=5), 2) == chunked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SHAPE),
        ({"num_key_value_heads": 8}, replace(SHAPE, key_width=64)),
        ({"head_dim": 16}, replace(SHAPE, query_width=128, key_width=64)),
        ({"intermediate_size": None}, replace(SHAPE, mlp_width=256)),
        ({"num_experts_per_tok": 4, "moe_intermediate_size": 50}, replace(SHAPE, mlp_width=200)),
        ({"num_experts_per_tok": 2}, replace(SHAPE, mlp_width=352)),
        ({"hidden_size": None}, None),
    ],
)
def test_sizes_of_other_configs(given: dict[str, Any], expected: LayerShape | None) -> None:
    class Config:
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 64, 2, 8, 4
        intermediate_size, vocab_size = 176, 96

        def get_text_config(self) -> Config:
            return self

    config = Config()
    for name, value in given.items():
        setattr(config, name, value)
    assert LayerShape.from_config(config) == expected


# ---- the walk over the groups ---------------------------------------------------------------------------------------

ROOT, EMBED, HEAD = GroupLoad("root", 10, 5), GroupLoad("embed", 400, 200), GroupLoad("head", 400, 200)


def peak(loads: list[GroupLoad], **more: Any) -> Peak:
    given = {"itemsize": 2, "num_shards": 2, "stage": 3, "max_copying": 0, "reduces_once": False}
    given["waits"] = [True] * len(loads)
    return find_peak(loads, **{**given, **more})


def layers(kept: int, work: int) -> list[GroupLoad]:
    return [GroupLoad(f"layer {i}", 100, 50, kept, work) for i in range(3)]


def test_the_worst_moment_moves_with_what_dominates() -> None:
    base = 2 * 10 + 2 * 10  # the root gathered, and its gradient
    found = peak([ROOT, EMBED, *layers(5000, 100), HEAD])
    # all activations, and the head's reduction: its gradient, input and output in float32; its weight, the next layer
    assert found == Peak("reduction of head", 0, base + 2 * (800 + 100) + 2 * 400 + 4 * 400 + 4 * 200, 15000)
    found = peak([ROOT, EMBED, *layers(10, 90000), HEAD])
    # the last layer's backward: the head's gradient has been reduced, its reduction's input is still there
    assert found == Peak("backward of layer 2", 2 * 200, base + 2 * (200 + 100) + 4 * 400 + 2 * 100, 90030)
    found = peak([ROOT, EMBED, *layers(0, 0)])
    # nothing but gradients: the embedding's reduction is the last large one
    assert found == Peak("reduction of embed", 3 * 2 * 50, base + 2 * 800 + 2 * 400 + 4 * 400 + 4 * 200, 0)


def test_stages_below_3_keep_everything_gathered() -> None:
    loads = [ROOT, EMBED, *layers(0, 0)]
    whole = 2 * (10 + 400 + 300)
    assert peak(loads, stage=2).gathered_bytes == whole + 2 * 10 + 2 * 400 + 4 * 400 + 4 * 200
    once = peak(loads, stage=1, reduces_once=True, waits=[False] * 5)
    assert once.gathered_bytes == whole + 4 * (10 + 400 + 300) + 2 * 400 + 4 * 400 + 4 * 200
    assert once.grad_bytes == 0


def test_frozen_groups_have_no_gradients() -> None:
    frozen = [replace(load, shard_numel=0) for load in [EMBED, *layers(0, 0)]]
    found = peak([ROOT, *frozen, HEAD])
    assert found.moment == "reduction of head" and found.grad_bytes == 0
    assert peak([]).num_bytes == 0


def test_gradients_that_leave_are_counted_while_they_are_copied() -> None:
    loads = [ROOT, EMBED, *layers(0, 0)]
    for max_copying, expected in ((0, 0), (1, 50), (2, 100), (7, 150)):
        assert peak(loads, waits=[False] * 5, max_copying=max_copying).grad_bytes == 2 * expected
    # the first layer's waits for its part on the device
    assert peak(loads, waits=[False, False, True, False, False], max_copying=1).grad_bytes == 2 * (50 + 50)


def test_what_leaves_the_device_follows_from_the_options() -> None:
    loads = [ROOT, EMBED, *layers(0, 0)]

    def grad_bytes(**options: Any) -> int:
        given = TieredOptions(**{"tier": Tier.HOST, "schedule": Schedule.DEFERRED, **options})
        return make_plan(loads, 360, given, stage=3, dtype=torch.bfloat16, num_shards=2).grad_bytes

    everything = 2 * 150  # when the embedding, the last of the large ones, is reduced
    assert grad_bytes(tier=Tier.DEVICE) == grad_bytes(schedule=Schedule.SYNCHRONOUS) == everything
    assert grad_bytes(streamed_share=1.0) == grad_bytes(gradients_on=Tier.DEVICE) == everything
    # MAX_COPYING of them; all three layers are fewer
    assert grad_bytes() == 2 * min(150, MAX_COPYING * 50)
    assert grad_bytes(accumulate=True) == 0


def test_accumulated_gradients_are_states() -> None:
    loads = [ROOT, EMBED, *layers(0, 0)]
    options = TieredOptions(accumulate=True)
    plan = make_plan(loads, 360, options, stage=3, dtype=torch.bfloat16, num_shards=2)
    assert plan.device_state_bytes == 16 * (5 + 200 + 150) and plan.grad_bytes == 0
    assert plan.param_bytes == 2 * 360


# ---- of a real model ------------------------------------------------------------------------------------------------


def loads_job(folder: Path, stage: int, freeze: tuple[str, ...], chunked: bool) -> list[GroupLoad]:
    """The loads of a model on meta, sharded on this rank."""
    from heavylift.memory.planner import ModelPlanner
    from heavylift.sharding import make_mesh, shard_model

    hf_config = load_hf_config(folder, False)
    model = build_on_meta(hf_config, ModelConfig(model_name_or_path=str(folder), freeze=freeze), torch.float32)
    assert install_loss_head(model, 7 if chunked else 0) is None
    sharded = shard_model(model, stage, make_mesh(stage, "cpu"))
    work = Workload(2, 16, Recompute.FULL, inputs_on_host=True, chunk_tokens=7 if chunked else 0)
    return ModelPlanner(sharded, LayerShape.from_config(hf_config), torch.float32).loads(work)


def test_groups_of_a_model_are_told_apart(tiny_llama_dir: Path, tiny_llama_tied_dir: Path) -> None:
    """hidden 32, 2 layers, MLP 64, vocabulary 320: the loss belongs to the head, or where tied to the whole model."""
    work = Workload(2, 16, Recompute.FULL, inputs_on_host=True, chunk_tokens=7)
    vocab = int(json.loads((tiny_llama_dir / "config.json").read_text())["vocab_size"])
    shape = LayerShape(2, 32, 32, 16, 64, 4, vocab)
    found = run_on_ranks(2, loads_job, tiny_llama_dir, 3, (), True)[0]
    names = ["root", "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    assert [load.name for load in found] == names
    assert found[4].work_bytes == loss_bytes(shape, work, 4)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    for load in found[2:4]:
        assert (load.num_params, load.shard_numel) == (layer, layer // 2)
        assert load.kept_bytes == 0 and load.host_bytes == 2 * 16 * 32 * 4
        assert load.work_bytes == backward_bytes(shape, work, 4, 0)
    tied = run_on_ranks(2, loads_job, tiny_llama_tied_dir, 3, ("model.layers.0.*",), True)[0]
    assert [load.name for load in tied] == ["root", "model.layers.0", "model.layers.1", "loss"]
    assert tied[0].num_params == vocab * 32 + 32 and tied[1].shard_numel == 0
    assert tied[3].work_bytes == loss_bytes(shape, work, 4)
    whole = run_on_ranks(2, loads_job, tiny_llama_dir, 0, (), False)[0]
    assert whole[-1].name == "loss" and whole[-1].work_bytes > 3 * 4 * 32 * vocab
    assert whole[2].shard_numel == layer


# ---- the machine ----------------------------------------------------------------------------------------------------

PLAN = MemoryPlan(
    param_bytes=2 * GIB,
    grad_bytes=2 * GIB,
    device_state_bytes=0,
    gathered_bytes=GIB,
    host_state_bytes=11 * GIB,
    pinned_bytes=GIB,
)
HOST = TieredOptions(tier=Tier.HOST)


def test_a_plan_that_fits_passes() -> None:
    check_plan(PLAN, MachineMemory(54 * GIB, 5 * GIB), 4, HOST)
    # without an accelerator the parameters lie on the host too
    check_plan(PLAN, MachineMemory(56 * GIB, None), 4, HOST)
    with pytest.raises(UserError, match=r"parameters and optimizer states need 56.0 GiB on this machine \(4 x 14.0\)"):
        check_plan(PLAN, MachineMemory(56 * GIB - 1, None), 4, HOST)


def test_programs_on_a_gpu_must_have_room_beside_the_states() -> None:
    """Else the kernel takes their own pages, and all stands still: 122.3 GiB of states where 126.6 were free."""
    many = replace(PLAN, host_state_bytes=int(122.25 * GIB) - PLAN.pinned_bytes)
    with pytest.raises(
        UserError, match=r"need 122\.\d GiB on this machine \(1 x 122\.\d\) and the programs 5\.5, 126\.6"
    ):
        check_plan(many, MachineMemory(int(126.6 * GIB), 140 * GIB), 1, HOST)
    check_plan(many, MachineMemory(int(127.8 * GIB), 140 * GIB), 1, HOST)
    # a plan that asks the host for nothing is not held up by a small one; a tenth of the free memory is enough
    check_plan(replace(PLAN, host_state_bytes=0, pinned_bytes=0), MachineMemory(GIB, 140 * GIB), 1, HOST)
    assert host_floor_bytes(MachineMemory(10 * GIB, GIB), 1) == GIB
    assert host_floor_bytes(MachineMemory(505 * GIB, GIB), 4) == 13 * GIB
    assert host_floor_bytes(MachineMemory(505 * GIB, None), 4) == 0


def test_what_is_left_beside_the_states_must_be_something() -> None:
    states = replace(PLAN, host_state_bytes=int(121.25 * GIB))
    check_left(GIB, states, 1, "lower engine.ratio")
    with pytest.raises(UserError) as caught:
        check_left(GIB * 2 // 3, states, 1, "lower engine.ratio, which is 0.75")
    assert str(caught.value) == (
        "host memory: 0.67 GiB are left beside 122.2 of optimizer states: programs would stand still for want of it; "
        "lower engine.ratio, which is 0.75, or end what else takes memory on this machine"
    )
    # a small model on a small machine; nothing on the host
    check_left(GIB // 8, replace(PLAN, host_state_bytes=GIB // 2, pinned_bytes=0), 4, "")
    check_left(0, replace(PLAN, host_state_bytes=0, pinned_bytes=0), 1, "")


def test_both_problems_come_together_each_with_what_would_fit() -> None:
    with pytest.raises(UserError) as caught:
        check_plan(PLAN, MachineMemory(36 * GIB, 4 * GIB), 4, HOST, lambda: ["a=1", "b=2"])
    host, device = caught.value.problems
    assert (
        "need 48.0 GiB on this machine (4 x 12.0) and the programs 3.6, 36.0 GiB are free; what would fit: a=1, or b=2"
        in host
    )
    assert "5.0 GiB are needed before any activation (parameters 2.0, gradients 2.0, gathered groups 1.0)" in device
    assert "4.0 GiB are free; what would fit" in device
    with pytest.raises(UserError, match="use more GPUs, a smaller model"):
        check_plan(PLAN, MachineMemory(GIB, 4 * GIB), 4, HOST)


def test_remedies_are_asked_for_only_when_needed() -> None:
    def fail() -> list[str]:
        raise AssertionError("asked")

    check_plan(PLAN, MachineMemory(54 * GIB, 5 * GIB), 4, HOST, fail)


def test_the_sizes_of_the_8b_shape_are_those_of_its_config() -> None:
    from transformers import AutoConfig

    folder = Path(__file__).parents[1] / "examples" / "shapes" / "llama_3_1_8b"
    assert LayerShape.from_config(AutoConfig.from_pretrained(folder)) == LLAMA_8B
    assert isinstance(llama_8b(2), ShapePlanner) and sum(g.num_params for g in llama_8b(2).loads(None)) == 8_030_261_248
