"""Tiny random models of many families, written as transformers writes them: with the names that the hub has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 101
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 4, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", _BASE | _WINDOWS),
    "gemma3n": (
        "gemma3n_text",
        _BASE
        | _WINDOWS
        | {
            "intermediate_size": [24, 24],
            "activation_sparsity_pattern": [0.0, 0.0],
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 4,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
        },
    ),
    "granite": ("granite", _BASE | {"logits_scaling": 8.0, "residual_multiplier": 0.2, "embedding_multiplier": 12.0}),
    "cohere": ("cohere", _BASE),
    "phi": ("phi", _BASE),
    "gpt2": ("gpt2", _GPT2 | _NO_DROPOUT),
    "gpt_neox": ("gpt_neox", _BASE),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "mamba": ("mamba", {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "falcon_h1": ("falcon_h1", _BASE | _MAMBA | {"mamba_d_ssm": 16}),
    "mixtral": ("mixtral", _BASE | _EXPERTS),
    "qwen3_moe": ("qwen3_moe", _BASE | _EXPERTS),
    "granitemoe": ("granitemoe", _BASE | _EXPERTS),
    "phimoe": ("phimoe", _BASE | _EXPERTS | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
    "gpt_oss": ("gpt_oss", _BASE | _WINDOWS | _EXPERTS),
    "deepseek_v3": (
        "deepseek_v3",
        _BASE
        | _MLA
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        _BASE
        | {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 8,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
}


def save_family(name: str, folder: Path, **more: Any) -> Path:
    """A folder with random weights, always the same; `more`: other keys of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(values | more)))
        with torch.no_grad():
            for param in model.parameters():
                # zero biases and norms of ones hide mistakes; and where all is tiny, so are the gradients
                param.add_(torch.randn_like(param), alpha=0.1)
    model.save_pretrained(folder)
    return folder
