"""The bare shapes in examples/shapes: they load, have the published sizes, and the tiny one runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES_DIR = Path(__file__).parents[1] / "examples" / "shapes"
NUM_PARAMS = {
    "llama_3_1_8b": 8_030_261_248,
    "llama_3_3_70b": 70_553_706_496,
    "qwen3_14b": 14_768_307_200,
    "tiny_llama": 869_504,
}


def test_every_shape_has_an_expected_size() -> None:
    assert {path.name for path in SHAPES_DIR.iterdir()} == NUM_PARAMS.keys()


@pytest.mark.parametrize("name", sorted(NUM_PARAMS))
def test_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHAPES_DIR / name))
    assert model.num_parameters() == NUM_PARAMS[name]


def test_tiny_shape_trains_on_a_cpu() -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(SHAPES_DIR / "tiny_llama")
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, config.vocab_size, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
