"""Model folders for the tests: a tiny Llama of awkward sizes, and the first layers of a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from ranks.llamas import llama_config, save_llama

VOCAB = 101
ROOT = Path(__file__).parent.parent.parent
SMOLLM2 = ROOT / ".cache" / "SmolLM2-135M-Instruct"


def save_odd_llama(folder: Path, tied: bool, dtype: torch.dtype = torch.float32, std: float = 0.3) -> Path:
    """A random Llama whose shards are uneven on 2 and on 4 ranks.

    9 rows over 4 ranks are 3 + 3 + 3 + 0: the last rank gets nothing of a norm. 2 rows (the one key head) are
    1 + 1 + 0 + 0. Grouped queries (3 heads, 1 key head), biases, and a vocabulary of 101.
    """
    config = llama_config(
        VOCAB,
        hidden=9,
        mlp=21,
        layers=2,
        heads=3,
        key_heads=1,
        tied=tied,
        head_dim=2,
        attention_bias=True,
        max_position_embeddings=64,
        initializer_range=std,
    )
    return save_llama(folder, config, dtype, bias_std=0.1)


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
