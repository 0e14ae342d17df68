"""Tiny Llamas: one way to write down a config, a config folder, a folder with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def llama_config(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, key_heads: int, *, tied: bool = False, **more: Any
) -> Any:
    """A transformers config; `more`: its other keys."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=tied,
        **more,
    )


def save_llama_config(folder: Path, config: Any) -> Path:
    """A folder with nothing but config.json, for models with random weights."""
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def save_llama(folder: Path, config: Any, dtype: torch.dtype = torch.float32, bias_std: float = 0.0) -> Path:
    """A folder with random weights, always the same.

    `bias_std`: biases are zero by default, which a mistake would not show in.
    """
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        if bias_std > 0:
            _draw_biases(model, bias_std)
    model.to(dtype).save_pretrained(folder)
    return folder


@torch.no_grad()
def _draw_biases(model: nn.Module, std: float) -> None:
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.normal_(std=std)
