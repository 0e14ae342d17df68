"""The check of a model folder's files is what loading goes by: nothing is read or compared a second time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from heavylift.config.schema import ModelConfig
from heavylift.models import load
from heavylift.models import stored as stored_module


def test_headers_are_read_once_and_the_weights_are_right(tiny_llama_tied_dir: Path, monkeypatch: Any) -> None:
    opened: Counter[Path] = Counter()
    real_open = load.safe_open

    def counting_open(path: Path, framework: str) -> Any:
        opened[Path(path)] += 1
        return real_open(path, framework=framework)

    for module in (load, stored_module):
        monkeypatch.setattr(module, "safe_open", counting_open)
    config = ModelConfig(model_name_or_path=str(tiny_llama_tied_dir))
    model = load.build_on_meta(load.load_hf_config(tiny_llama_tied_dir, False), config, torch.float32)
    stored = load.check_weights(model, tiny_llama_tied_dir)
    assert set(opened.values()) == {1}  # once per file, not once per tensor
    load.materialise(model, torch.device("cpu"))
    load.load_weights(model, tiny_llama_tied_dir, stored)
    assert set(opened.values()) == {2}
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_llama_tied_dir)
    for name, param in reference.named_parameters():
        assert torch.equal(model.get_parameter(name), param), name


def test_what_was_checked_is_believed(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A mapping to another folder's file is followed: `load_weights` does not look for the tensors again."""
    config = ModelConfig(model_name_or_path=str(tiny_llama_dir))
    model = load.build_on_meta(load.load_hf_config(tiny_llama_dir, False), config, torch.float32)
    stored = load.check_weights(model, tiny_llama_dir)
    load.materialise(model, torch.device("cpu"))
    load.load_weights(model, tmp_path / "empty", stored)
    with pytest.raises(ValueError, match="not in any safetensors file"):
        load.load_weights(model, tmp_path / "empty")
