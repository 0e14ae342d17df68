"""The profiler's counts are the products that a model's shapes say, under FSDP2 and recomputation too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.pool import run_on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from heavylift.api.flops_ops import more_operators
from heavylift.api.flops_profiler import FlopsProfiler, get_model_profile
from heavylift.api.flops_text import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from heavylift.errors import UserError


class Block(nn.Module):
    """Two products, the second behind a condition that a test can change."""

    def __init__(self, width: int, hidden: int, recompute: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.recompute = recompute

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._body, x, use_reentrant=False) if self.recompute else self._body(x)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 3, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 16, recompute) for _ in range(num_blocks))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK_FLOPS = 2 * 2 * 8 * 16  # per row
HEAD_FLOPS = 2 * 8 * 4
MODEL_FLOPS = 3 * BLOCK_FLOPS + HEAD_FLOPS
MODEL_PARAMS = 3 * 2 * 8 * 16 + 8 * 4 + 4
ROWS = 5


def profiled(model: nn.Module, *args: Any, backward: bool = False) -> FlopsProfiler:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    output = model(*args)
    if backward:
        output.sum().backward()
    profiler.stop_profile()
    return profiler


def test_counts_of_every_module_are_those_of_its_shapes() -> None:
    model = Model()
    profiler = profiled(model, torch.randn(ROWS, 8))
    assert profiler.get_total_flops() == ROWS * MODEL_FLOPS
    assert profiler.get_total_macs() == ROWS * MODEL_FLOPS // 2
    assert profiler.get_total_params() == MODEL_PARAMS
    costs = {cost.name: cost for cost in profiler.costs()}
    assert [costs[""].flops, costs["blocks.1"].flops] == [ROWS * MODEL_FLOPS, ROWS * BLOCK_FLOPS]
    assert costs["blocks.2.up"].flops == ROWS * BLOCK_FLOPS // 2
    assert (costs["blocks.2.up"].num_params, costs["blocks.2.up"].depth, costs["head"].kind) == (128, 3, "Linear")
    # a list of modules has no forward of its own
    assert costs["blocks"].flops == 3 * ROWS * BLOCK_FLOPS
    assert costs["blocks"].duration_s == pytest.approx(sum(costs[f"blocks.{k}"].duration_s for k in range(3)))
    duration = profiler.get_total_duration()
    assert isinstance(duration, float) and duration >= costs["blocks.0"].duration_s > 0


def test_several_forwards_add_up_and_a_new_start_forgets() -> None:
    model, x = Model(), torch.randn(ROWS, 8)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x)
    model(x)
    assert profiler.get_total_flops() == 2 * ROWS * MODEL_FLOPS
    profiler.reset_profile()
    model(x[:1])
    assert profiler.get_total_flops() == MODEL_FLOPS
    profiler.start_profile()
    model(x[:2])
    profiler.stop_profile()
    model(x)
    assert profiler.get_total_flops() == 2 * MODEL_FLOPS
    profiler.end_profile()
    with pytest.raises(UserError, match="nothing is profiled"):
        profiler.get_total_flops()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_and_what_it_recomputes_are_not_counted(recompute: bool) -> None:
    model = Model(recompute=recompute)
    profiler = profiled(model, torch.randn(ROWS, 8), backward=True)
    assert profiler.get_total_flops() == ROWS * MODEL_FLOPS
    costs = {cost.name: cost.flops for cost in profiler.costs()}
    assert [costs[f"blocks.{index}.down"] for index in range(3)] == [ROWS * BLOCK_FLOPS // 2] * 3


def test_gradients_of_a_profiled_step_are_the_same_bits() -> None:
    model, x = Model(recompute=True), torch.randn(ROWS, 8)
    model(x).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    output = model(x)
    profiler.stop_profile()
    output.sum().backward()
    assert len(plain) == len(list(model.parameters()))
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, expected)
    assert profiler.get_total_flops() == ROWS * MODEL_FLOPS


def test_shared_parameters_count_once_and_their_products_each_time() -> None:
    model = Model()
    model.blocks[1] = model.blocks[0]
    profiler = profiled(model, torch.randn(ROWS, 8))
    assert profiler.get_total_params() == MODEL_PARAMS - 2 * 8 * 16
    assert profiler.get_total_flops() == ROWS * MODEL_FLOPS
    costs = {cost.name: cost.flops for cost in profiler.costs()}
    assert costs["blocks.0"] == 2 * ROWS * BLOCK_FLOPS


def test_ignored_classes_are_left_out_of_all_that_hold_them() -> None:
    model = Model()
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[Block])
    model(torch.randn(ROWS, 8))
    profiler.stop_profile()
    assert profiler.get_total_flops() == ROWS * HEAD_FLOPS
    costs = {cost.name: cost.flops for cost in profiler.costs()}
    assert [costs[name] for name in ("blocks", "blocks.0", "head")] == [0, 0, ROWS * HEAD_FLOPS]


class _Call(nn.Module):
    """A function as a model."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        # 2 products of [q, k] x dim for each of 2 x 3 heads; a causal mask saves nothing
        (F.scaled_dot_product_attention, [(2, 3, 7, 16)] * 3, 2 * 2 * 2 * 3 * 7 * 7 * 16),
        (lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), [(1, 1, 4, 8)] * 3, 4 * 4 * 4 * 8),
        # two heads of keys for four of queries: torch 2.11 raises where it counts this itself
        (
            lambda *qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True),
            [(2, 4, 7, 16), (2, 2, 7, 16), (2, 2, 7, 16)],
            2 * 2 * 2 * 4 * 7 * 7 * 16,
        ),
        (torch.matmul, [(4, 5), (5,)], 2 * 4 * 5),
        (torch.dot, [(6,), (6,)], 2 * 6),
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (F.conv2d, [(1, 3, 8, 8), (4, 3, 3, 3)], 2 * 6 * 6 * 4 * 3 * 9),
        (lambda x: x.relu().softmax(-1) * 2, [(8, 8)], 0),
    ],
)
def test_operators(function: Any, shapes: list[tuple[int, ...]], flops: int) -> None:
    assert profiled(_Call(function), *(torch.randn(shape) for shape in shapes)).get_total_flops() == flops


def test_attention_is_counted_as_torch_counts_it_wherever_it_runs() -> None:
    counts, aten = more_operators(), torch.ops.aten
    query, key, value, out = (2, 6, 7, 16), (2, 6, 9, 16), (2, 6, 9, 24), (2, 6, 7, 24)
    shared = (2, 3, 9, 16), (2, 3, 9, 24)
    for kind in ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu"):
        forward = counts[getattr(aten, f"_scaled_dot_product_{kind}")]
        backward = counts[getattr(aten, f"_scaled_dot_product_{kind}_backward")]
        assert forward(query, key, value, out_shape=out) == sdpa_flop_count(query, key, value)
        assert backward(out, query, key, value) == sdpa_backward_flop_count(out, query, key, value)
        assert forward(query, *shared, out_shape=out) == forward(query, key, value)
        assert backward(out, query, *shared) == backward(out, query, key, value)


@pytest.mark.parametrize("grad", [True, False])
def test_recurrent_layers_and_the_fused_encoder_layer_are_seen(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        lstm = nn.LSTM(8, 16, num_layers=2, bidirectional=True)
        products = sum(p.numel() for p in lstm.parameters() if p.ndim == 2)
        assert profiled(lstm, torch.randn(5, 2, 8)).get_total_flops() == 2 * 5 * 2 * products
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
        batch, length, width, hidden = 2, 5, 32, 64
        dense = 2 * batch * length * (4 * width * width + 2 * width * hidden)
        attention = 2 * 2 * batch * length * length * width
        before = torch.backends.mha.get_fastpath_enabled()
        assert profiled(layer, torch.randn(batch, length, width)).get_total_flops() == dense + attention
        assert torch.backends.mha.get_fastpath_enabled() == before


def test_a_forward_that_fails_leaves_a_profiler_that_works() -> None:
    model = Model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(ROWS, 9))
    profiler.reset_profile()
    model(torch.randn(ROWS, 8))
    profiler.stop_profile()
    assert profiler.get_total_flops() == ROWS * MODEL_FLOPS


def fsdp_job(rank: int, world_size: int) -> tuple[int, int, bool, list[int]]:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    is_sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    profiler = FlopsProfiler(model)
    if rank == 0:  # as an engine does: one rank profiles, the others train on
        profiler.start_profile()
    model(torch.randn(ROWS, 8)).sum().backward()
    if rank != 0:
        return 0, 0, is_sharded, []
    profiler.stop_profile()
    return (
        int(profiler.get_total_flops()),
        int(profiler.get_total_params()),
        is_sharded,
        [cost.flops for cost in profiler.costs() if cost.kind == "Linear"],
    )


def _fsdp_job() -> tuple[int, int, bool, list[int]]:
    import torch.distributed as dist

    return fsdp_job(dist.get_rank(), dist.get_world_size())


def test_under_fsdp2_every_count_is_of_whole_weights() -> None:
    first, second = run_on_ranks(2, _fsdp_job)
    half = ROWS * BLOCK_FLOPS // 2
    assert first == (ROWS * MODEL_FLOPS, MODEL_PARAMS, True, [half] * 6 + [ROWS * HEAD_FLOPS])
    assert second[2]


def test_model_profile_in_numbers_and_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model().train()
    found = get_model_profile(model, input_shape=(ROWS, 8), as_string=False, print_profile=False)
    assert found == (ROWS * MODEL_FLOPS, ROWS * MODEL_FLOPS // 2, MODEL_PARAMS)
    assert capsys.readouterr().out == ""
    assert all(module.training for module in model.modules())
    words = get_model_profile(model, kwargs={"x": torch.randn(1000, 8)}, warm_up=0)
    assert words == ("1.6 MFLOPS", "800 kMACs", "804")
    printed = capsys.readouterr().out
    assert "forward MACs per process" in printed and "(blocks)" in printed


class _Generator(Model):
    def generate(self, x: torch.Tensor, num: int) -> torch.Tensor:
        for _ in range(num):
            x = torch.cat([self(x), self(x)], dim=-1)
        return x


def test_generation_counts_all_its_forwards() -> None:
    args = (torch.randn(ROWS, 8), 3)
    found = get_model_profile(_Generator(), args=args, mode="generate", print_profile=False, as_string=False)
    assert found[0] == 6 * ROWS * MODEL_FLOPS


def test_a_dtype_of_its_own_and_a_failing_model() -> None:
    model = Model().to(torch.bfloat16)
    assert get_model_profile(model, (ROWS, 8), print_profile=False, as_string=False)[0] == ROWS * MODEL_FLOPS
    with pytest.raises(RuntimeError):
        get_model_profile(model, (ROWS, 9), warm_up=0)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give input_shape, or args and kwargs"),
        ({"input_shape": [1, 2]}, "expected a tuple of sizes, got"),
        ({"input_shape": (1, 8), "mode": "train"}, "expected forward or generate, got 'train'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_model_profile(Model(), **arguments)


class _Engine:
    world_size = 4

    def train_micro_batch_size_per_gpu(self) -> int:
        return ROWS

    def gradient_accumulation_steps(self) -> int:
        return 2


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    profiler = FlopsProfiler(model, _Engine(), recompute_fwd_factor=1.0)
    profiler.print_model_profile()
    assert capsys.readouterr().out == "", "nothing was started"
    profiler.start_profile()
    model(torch.randn(ROWS, 8))
    profiler.stop_profile()
    profiler.print_model_profile(profile_step=7, top_modules=2, output_file=tmp_path / "new" / "profile.txt")
    assert capsys.readouterr().out == ""
    lines = (tmp_path / "new" / "profile.txt").read_text().splitlines()
    assert "flops profile, step 7" in lines[0]
    rows = dict(line.split("  ", 1) for line in lines if "  " in line and not line.startswith(" "))
    value = {key: text.strip() for key, text in rows.items()}
    assert value["processes"] == "4"
    assert value["forward FLOPs per process"] == flops_to_string(ROWS * MODEL_FLOPS)
    assert value["backward FLOPs per process, estimated"] == flops_to_string(3 * ROWS * MODEL_FLOPS)
    assert value["optimizer step, all processes, estimated"] == flops_to_string(4 * 8 * ROWS * MODEL_FLOPS)
    tree = [line for line in lines if "(up)" in line]
    assert len(tree) == 3 and all("128 (" in line and f"({BLOCK_FLOPS / 2 / MODEL_FLOPS:.1%})" in line for line in tree)
    depth_1 = lines.index("depth 1:")
    assert lines[depth_1 + 1] == "  params  ModuleList 768, Linear 36"
    profiler.print_model_profile(module_depth=1, detailed=True)
    shallow = capsys.readouterr().out
    assert "(head) Linear" in shallow and "(0) Block" not in shallow and "depth 2" not in shallow
    profiler.print_model_profile(detailed=False)
    assert "(head)" not in capsys.readouterr().out


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    profiler = profiled(Model(), torch.randn(1, 8))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="flops_profiler.output_file: .* cannot be written"):
        profiler.print_model_profile(output_file=tmp_path / "file" / "profile.txt")


def test_words() -> None:
    assert [number_to_string(x) for x in (0, 5, 999, 1234, 2.5e9, 0.0032)] == [
        "0",
        "5",
        "999",
        "1.23 k",
        "2.5 G",
        "3.2 m",
    ]
    assert flops_to_string(1.236e12) == "1.24 TFLOPS"
    assert macs_to_string(2e6, units="G", precision=4) == "0.002 GMACs"
    assert (params_to_string(134_515_008), params_to_string(1500, units="K")) == ("134.52 M", "1.5 K")
    assert [duration_to_string(x) for x in (2.0, 0.0015, 3e-6)] == ["2 s", "1.5 ms", "3 us"]
