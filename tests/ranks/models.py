"""Model folders for the tests: a tiny Llama of awkward sizes, and the first layers of a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

VOCAB = 101
ROOT = Path(__file__).parent.parent.parent
SMOLLM2 = ROOT / ".cache" / "SmolLM2-135M-Instruct"


def save_odd_llama(folder: Path, tied: bool, dtype: torch.dtype = torch.float32, std: float = 0.3) -> Path:
    """A random Llama whose shards are uneven on 2 and on 4 ranks.

    9 rows over 4 ranks are 3 + 3 + 3 + 0: the last rank gets nothing of a norm. 2 rows (the one key head) are
    1 + 1 + 0 + 0. Grouped queries (3 heads, 1 key head), biases, and a vocabulary of 101.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=9,
        head_dim=2,
        intermediate_size=21,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_bias=True,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=std,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name.endswith("bias"):
                    param.normal_(std=0.1)  # zero by default, which a mistake would not show in
    model.to(dtype).save_pretrained(folder)
    return folder


def save_cut_smollm2(folder: Path, num_layers: int = 2) -> Path:
    """The real SmolLM2-135M-Instruct, cut to its first layers: embedding, layers, final norm."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    if not (SMOLLM2 / "config.json").is_file():
        subprocess.run([sys.executable, str(ROOT / "examples" / "get_smollm2.py"), str(SMOLLM2)], check=True)
    tensors = {}
    for path in sorted(SMOLLM2.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                layer = name.split(".")[2] if name.startswith("model.layers.") else "0"
                if int(layer) < num_layers:
                    tensors[name] = file.get_tensor(name)
    config = json.loads((SMOLLM2 / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
