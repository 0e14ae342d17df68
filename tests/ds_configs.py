"""The ds_config.json files of tests/data/ds_configs, and what a trainer would fill their "auto" with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from heavylift.config.deepspeed.sources import read_source

FOLDER = Path(__file__).parent / "data" / "ds_configs"


def all_config_files() -> list[Path]:
    """Every file that heavylift takes, in order."""
    return sorted(FOLDER.glob("*.json"))


def refused_config_files() -> list[Path]:
    """Every file that asks for what heavylift does not have, or is mistyped."""
    return sorted((FOLDER / "refused").glob("*.json"))


def raw_config(path: Path) -> dict[str, Any]:
    """The file as a mapping."""
    return read_source(path).values


def trainer_defaults(path: Path) -> dict[str, Any]:
    """What fills "auto": float16 where the file knows no bf16 block, as people with older GPUs have it."""
    return {
        "lr": 1e-3,
        "betas": [0.9, 0.98],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "total_num_steps": 20,
        "warmup_num_steps": 4,
        "warmup_min_lr": 0,
        "bf16": "bf16" in raw_config(path),
        "fp16": "bf16" not in raw_config(path),
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "hidden_size": 32,
    }


def with_small_batch(raw: dict[str, Any], micro_batch: int = 2) -> dict[str, Any]:
    """The config for a small run of any world size: `micro_batch` rows, accumulation as in the file, at most 4."""
    accumulation = raw.get("gradient_accumulation_steps", 1)
    small = {key: value for key, value in raw.items() if key != "train_batch_size"}
    small["train_micro_batch_size_per_gpu"] = micro_batch
    small["gradient_accumulation_steps"] = min(accumulation, 4) if isinstance(accumulation, int) else 2
    return small


def own_world_size(path: Path) -> int:
    """Ranks for which the file's batch equation has a solution."""
    raw = raw_config(path)
    sizes = [raw.get(f"train_{name}") for name in ("batch_size", "micro_batch_size_per_gpu")]
    accumulation = raw.get("gradient_accumulation_steps")
    if isinstance(sizes[0], int) and isinstance(sizes[1], int) and isinstance(accumulation, int):
        return sizes[0] // (sizes[1] * accumulation)
    return 4


def write_config(folder: Path, config: Any, name: str = "ds_config.json") -> Path:
    """The config as a JSON file in `folder`."""
    path = folder / name
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def keys_of_note(note: str) -> list[str]:
    """The keys that a note is about: `block.{key, key}: text`, `key, key: text`, `key: text`."""
    head = note.partition(": ")[0]
    block, brace, names = head.partition(".{")
    return [f"{block}.{name}" for name in names.removesuffix("}").split(", ")] if brace else head.split(", ")
