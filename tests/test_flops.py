"""FLOPs: the examples' formula against published numbers, the model's against torch's counter and real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from heavylift.train.flops import DENSE_FAMILIES, ModelShape, causal_pairs, examples_flops, model_flops

SHAPES_DIR = Path(__file__).parents[1] / "examples" / "shapes"
TINY: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    vocab_size=96,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def meta_model(model_type: str, **keys: Any) -> torch.nn.Module:
    config = AutoConfig.for_model(model_type, **{**TINY, **keys})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_examples_formula_gives_the_measured_tflops() -> None:
    # DeepSpeed ZeRO-3 on a Llama-3.1-8B shape, micro-batch 4 x 4096: 2.29 s a step printed as 521 TFLOPS per GPU
    flops = examples_flops(8_030_261_248, num_layers=32, hidden=4096, seq_len=4096, batch=4)
    assert flops / 2.29 / 1e12 == pytest.approx(521, abs=0.5)


def test_examples_formula_counts_recomputation_as_a_fourth_pass() -> None:
    one = examples_flops(1000, num_layers=2, hidden=8, seq_len=16, batch=1)
    assert one == 2 * 4 * 1000 * 16 + 2 * 2 * 4 * 2 * 8 * 16**2
    assert examples_flops(1000, 2, 8, 16, batch=3) == 3 * one
    assert examples_flops(1000, 2, 8, 16, batch=1, recompute=False) == one * 3 / 4


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_model_formula_agrees_with_torchs_counter(model_type: str, tie: bool) -> None:
    torch.manual_seed(0)
    keys = {**TINY, "tie_word_embeddings": tie}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **keys), attn_implementation="eager", dtype=torch.float32
    )
    batch, length = 2, 10
    ids = torch.randint(3, 96, (batch, length))
    # rotary angles come from one small matrix product; give the model fixed ones, they are not the model's FLOPs
    cos = sin = torch.ones(1, length, TINY["head_dim"])
    model.model.rotary_emb.forward = lambda *_args, **_keys: (cos, sin)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()

    shape = ModelShape.from_config(model.config.to_dict())
    assert (shape.formula, shape.tie) == ("dense", tie)
    # eager attention multiplies out the whole square and masks afterwards
    num_masked_pairs = length**2 - causal_pairs(length)
    masked_flops = 3 * batch * shape.num_layers * 4 * shape.heads * shape.head_dim * num_masked_pairs
    assert counter.get_total_flops() == model_flops(shape, [length] * batch) + masked_flops


@pytest.mark.parametrize("model_type", sorted(DENSE_FAMILIES))
def test_dense_families_have_the_matrices_that_the_formula_counts(model_type: str) -> None:
    model = meta_model(model_type)
    in_layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2)
    shape = ModelShape.from_config(model.config.to_dict())
    assert shape.formula == "dense"
    assert shape.matmul_params == in_layers + TINY["vocab_size"] * TINY["hidden_size"]


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_mixture_of_experts_counts_the_visited_experts(model_type: str) -> None:
    sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "intermediate_size": 48}
    sizes["num_local_experts" if model_type == "mixtral" else "num_experts"] = 2
    all_visited = meta_model(model_type, **sizes)
    sizes["num_local_experts" if model_type == "mixtral" else "num_experts"] = 8
    some_visited = meta_model(model_type, **sizes)
    shape = ModelShape.from_config(some_visited.config.to_dict(), some_visited.num_parameters())
    assert shape.formula == "6N active"
    # visiting 2 of 8 costs what a model of 2 experts costs; the router scores all 8
    router = 6 * TINY["hidden_size"] * TINY["num_hidden_layers"]
    embedding = TINY["vocab_size"] * TINY["hidden_size"]
    assert shape.matmul_params == all_visited.num_parameters() - embedding + router


def test_unknown_family_falls_back_to_six_n_and_says_so() -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}
    shape = ModelShape.from_config({**config, "tie_word_embeddings": True}, num_params=100_000)
    assert shape.formula == "6N"
    assert model_flops(shape, [10]) == 6 * 100_000 * 10 + 3 * 4 * 2 * 32 * 55
    untied = ModelShape.from_config(config, num_params=100_000)
    assert untied.matmul_params == 100_000 - 96 * 32


def test_unknown_family_without_parameter_count_is_refused() -> None:
    with pytest.raises(ValueError, match="'gpt2'.*number of parameters"):
        ModelShape.from_config({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4})


def test_config_without_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers"):
        ModelShape.from_config({"model_type": "llama", "hidden_size": 32})


def test_lengths_add_up_and_only_real_tokens_count() -> None:
    shape = ModelShape.from_config({**TINY, "model_type": "llama"})
    assert model_flops(shape, []) == 0
    assert model_flops(shape, [3, 7]) == model_flops(shape, [3]) + model_flops(shape, [7])
    # packed samples do not attend to each other
    assert model_flops(shape, [3, 7]) < model_flops(shape, [10])


@pytest.mark.parametrize("length", [1, 3, 4, 9])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_pairs_equal_a_counted_mask(length: int, window: int | None) -> None:
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None, :]
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    assert causal_pairs(length, window) == int(mask.sum())


@pytest.mark.parametrize(
    ("keys", "num_windowed"),
    [
        ({"model_type": "mistral", "sliding_window": 4}, 2),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": False, "max_window_layers": 0}, 0),
        ({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, 1),
        ({"model_type": "gemma2", "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, 1),
        ({"model_type": "gemma2", "sliding_window": 4}, 0),
    ],
)
def test_sliding_windows_shorten_attention_in_the_layers_that_have_them(keys: Any, num_windowed: int) -> None:
    full = ModelShape.from_config({**TINY, "model_type": "llama"})
    shape = ModelShape.from_config({**TINY, **keys})
    saved_pairs = causal_pairs(10) - causal_pairs(10, 4)
    assert shape.num_windowed_layers == num_windowed
    saved = num_windowed * saved_pairs * 4 * 4 * 12 * 3
    assert model_flops(full, [10]) - model_flops(shape, [10]) == saved


def test_published_shape_by_hand() -> None:
    # Llama-3.1-8B: 7,504,658,432 matrix elements per token, 32 layers x 32 heads x 128
    config = json.loads((SHAPES_DIR / "llama_3_1_8b" / "config.json").read_text())
    shape = ModelShape.from_config(config)
    assert shape.matmul_params == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert model_flops(shape, [4096]) == 6 * 7_504_658_432 * 4096 + 12 * 32 * 4096 * (4096 * 4097 // 2)
