"""How much arithmetic a step is: two conventions, always shown beside each other.

`examples_flops`   what DeepSpeed's SuperOffload examples print, so that published numbers compare: every parameter
                   counts (the embedding too), pads count, attention is a full square, recomputation counts.
`model_flops`      what the model needs: forward and backward (factor 3), real tokens only, causal attention.

Both count a multiplication and an addition as 2. Divide by the step's seconds and 1e12 for TFLOPS. Left out: norms,
activations, rotary embedding, softmax, the loss, the optimizer (all below a percent of a large model); that frozen
parameters need no weight gradient; and peaks of hardware (utilisation in percent).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Formula = Literal["dense", "6N", "6N active"]

# q, k, v, o and one gated MLP (gate, up, down) in every layer; tests/test_flops.py compares each with the real model
DENSE_FAMILIES = frozenset(
    "cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 granite llama ministral mistral olmo olmo2 "
    "olmo3 phi3 qwen2 qwen3 seed_oss smollm3".split()
)
# where `sliding_window` without `layer_types` means every layer (Qwen: from `max_window_layers` on)
_ALWAYS_WINDOWED = frozenset("ministral mistral mixtral phi3 qwen2 qwen2_moe qwen3 qwen3_moe".split())
# first name that is there wins
_KEYS = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "decoder_attention_heads"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}


def examples_flops(
    num_params: int, num_layers: int, hidden: int, seq_len: int, batch: int, recompute: bool = True
) -> float:
    """FLOPs of `batch` sequences of `seq_len` tokens (pads included) by the SuperOffload examples' formula.

    Per sequence `2 k P S + 4 k L H S^2`, with P all parameters; k is 4 where the forward pass is recomputed
    (`recompute`, their published runs) and 3 else. Source: `estimate_transformer_tflops` in DeepSpeedExamples,
    training/DeepSpeed-SuperOffload/finetune_zero3.py.
    """
    passes = 4 if recompute else 3
    return float(batch * (2 * passes * num_params * seq_len + 4 * passes * num_layers * hidden * seq_len**2))


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder that `model_flops` needs, and which formula they allow (`formula`).

    `dense`       every matrix is known from the config: exact.
    `6N`          unknown family: 6 FLOPs per token for each of `num_matmul_params`.
    `6N active`   mixture of experts: the same, with only the experts that a token visits.
    """

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tie: bool
    window: int | None = None
    """Tokens that a windowed layer looks back on, itself included."""
    num_windowed_layers: int = 0
    formula: Formula = "dense"
    num_matmul_params: int | None = None
    """Parameters used per token, the embedding lookup excluded; only where `formula` is not `dense`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], num_params: int | None = None) -> Self:
        """Read `config.to_dict()` of a Hugging Face config, or its config.json.

        The former is better: it has the defaults filled in, and which layers have a sliding window (`layer_types`);
        where that is missing, attention is taken as full except in families known to window every layer.

        `num_params`: parameters of the model, a tied head once. Needed for families other than dense gated
        decoders, ignored for those. Raises ValueError where it is missing but needed, or where the config lacks the
        number of layers, the hidden size or the number of heads.
        """
        config = config.get("text_config") or config
        num_layers, hidden, heads = (_first(config, name) for name in ("num_layers", "hidden", "heads"))
        num_layers = num_layers or len(config.get("layers_block_type") or ())
        if not heads and config.get("model_type") not in DENSE_FAMILIES and config.get("model_type"):
            heads = 0  # Mamba, RWKV: no attention
        if not (num_layers and hidden) or heads is None:
            raise ValueError("config.json: expected num_hidden_layers, hidden_size and num_attention_heads")
        window, num_windowed = _window(config, num_layers)
        vocab, tie = config.get("vocab_size") or 0, bool(config.get("tie_word_embeddings", False))
        formula: Formula = "dense"
        num_matmul: int | None = None
        idle = _idle_expert_params(config, num_layers, hidden)
        if idle is not None or config.get("model_type") not in DENSE_FAMILIES:
            if num_params is None:
                raise ValueError(f"model_type {config.get('model_type')!r}: its FLOPs need the number of parameters")
            formula = "6N active" if idle else "6N"
            # tied, the one matrix works once per token, as the head; untied, the embedding is only looked up
            num_matmul = num_params - (idle or 0) - (0 if tie else vocab * hidden)
            assert num_matmul > 0, f"{num_params} parameters, {idle} in idle experts, vocabulary {vocab} x {hidden}"
        return cls(
            num_layers=num_layers,
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or (hidden // heads if heads else 0),
            intermediate=config.get("intermediate_size") or 4 * hidden,
            vocab=vocab,
            tie=tie,
            window=window,
            num_windowed_layers=num_windowed,
            formula=formula,
            num_matmul_params=num_matmul,
        )

    @property
    def matmul_params(self) -> int:
        """Matrix elements that each token meets: layers and head (tied or not), no embedding, biases or norms."""
        if self.num_matmul_params is not None:
            return self.num_matmul_params
        # q and o are hidden x (heads * head_dim); k and v have kv_heads; gate, up and down
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab


def model_flops(shape: ModelShape, sample_lengths: Iterable[int]) -> float:
    """FLOPs of forward and backward over samples of these lengths (real tokens; a packed sample on its own).

    Forward, per sample of s tokens: `2 * matmul_params * s + 4 * heads * head_dim * pairs(s)` (the second summed over
    layers), where a token attends to itself and those before it: `pairs = s (s + 1) / 2`, fewer in layers with a
    sliding window. Backward is twice the forward. Source: https://arxiv.org/abs/2205.05198 appendix A, causal.
    """
    per_pair = 4 * shape.heads * shape.head_dim
    num_full_layers = shape.num_layers - shape.num_windowed_layers
    total = 0
    for length in sample_lengths:
        pairs = num_full_layers * causal_pairs(length) + shape.num_windowed_layers * causal_pairs(length, shape.window)
        total += 2 * shape.matmul_params * length + per_pair * pairs
    return float(3 * total)


def causal_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs of one causal sample; with `window`, a token sees at most that many, itself included."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _first(config: Mapping[str, Any], name: str) -> int | None:
    return next((config[key] for key in _KEYS[name] if config.get(key)), None)


def _window(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, int]:
    """Sliding window in tokens and the number of layers that have it."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None, 0
    kinds = config.get("layer_types")
    if kinds:
        return window, sum(kind == "sliding_attention" for kind in kinds)
    if config.get("model_type") not in _ALWAYS_WINDOWED:
        return None, 0
    return window, num_layers - min(config.get("max_window_layers") or 0, num_layers)


def _idle_expert_params(config: Mapping[str, Any], num_layers: int, hidden: int) -> int | None:
    """Parameters of routed experts that a token does not visit; None for a dense model, 0 where sizes are unknown."""
    num_experts = _first(config, "num_experts")
    if not num_experts or num_experts == 1:
        return None
    num_active = config.get("num_experts_per_tok")
    intermediate = config.get("moe_intermediate_size") or config.get("intermediate_size")
    if not num_active or not intermediate:
        return 0
    dense = set(config.get("mlp_only_layers") or ()) | set(range(config.get("first_k_dense_replace") or 0))
    stride = config.get("decoder_sparse_step") or 1
    num_sparse_layers = sum(layer not in dense and (layer + 1) % stride == 0 for layer in range(num_layers))
    return num_sparse_layers * (num_experts - num_active) * 3 * hidden * intermediate
