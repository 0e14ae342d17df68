"""Looks into a Hugging Face model folder without torch: is everything there, whole and readable?

Only headers are read, so it takes milliseconds for a model of any size. Left out: whether the tensors fit the
config (needs the model's class, see `heavylift.models.load`).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heavylift.config.schema import Recipe
from heavylift.errors import UserError

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "*.md")
_HEADER_LIMIT_BYTES = 100_000_000  # of the safetensors format


@dataclass(frozen=True)
class Weights:
    """Sizes from the safetensors headers: number of parameters (ties counted once, as stored)."""

    num_params: int
    tensors: frozenset[str]


def resolve_model_folder(recipe: Recipe) -> Path:
    """The model's folder; a hub id (`org/name`) is downloaded into the Hugging Face cache, once.

    Raises UserError if the folder does not exist and the hub cannot give it.
    """
    weights = ("*.safetensors",) if recipe.model.init == "pretrained" else ()
    return _resolve(recipe.model.model_name_or_path, "model.model_name_or_path", weights, recipe)


def resolve_tokenizer_folder(recipe: Recipe) -> Path:
    """The tokenizer's folder, by the same rules; the model's own folder unless `tokenizer_name_or_path` is set."""
    name = recipe.model.tokenizer_name_or_path
    return _resolve(name, "model.tokenizer_name_or_path", (), recipe) if name else resolve_model_folder(recipe)


def folder_here(name: str, key: str) -> Path | None:
    """The folder of this machine that `name` is; None for a hub id, which is not looked up.

    Raises UserError, which names `key`, for what can be neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{name}: expected a model folder, got a file; change {key}")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"{name}: no such model folder; change {key}")
    return None


def _resolve(name: str, key: str, more_files: tuple[str, ...], recipe: Recipe) -> Path:
    folder = folder_here(name, key)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download  # takes a while to import

    code = ("*.py",) if recipe.model.trust_remote_code else ()
    try:
        return Path(snapshot_download(name, allow_patterns=[*SMALL_FILES, *more_files, *code]))
    except Exception as error:  # many kinds: network, no such repository, gated, disk; all mean that it is not here
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= 200 else reason[:200] + "..."
        raise UserError(
            f"{name}: no such folder, and it cannot be fetched from the Hugging Face hub: {reason}; change {key}"
        ) from None


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """The folder's config.json. Raises UserError if it is missing, broken or names no `model_type`."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; is this a Hugging Face model folder? change {key}")
    config = read_json(path)
    if not config.get("model_type"):
        raise UserError(f"{path}: `model_type` is missing; expected the name of an architecture such as llama")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises UserError with line and column otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}; get the file anew") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8
        raise UserError(f"{path}: cannot be read: {error}; get the file anew") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}; get the file anew")
    return value


def read_weights(folder: Path) -> Weights:
    """Reads the headers of all weight files. Raises UserError for each file that is missing, cut or broken."""
    files, listed = _weight_files(folder)
    problems: list[str] = []
    sizes: dict[str, int] = {}
    for file in files:
        try:
            sizes.update(_read_header(file))
        except UserError as error:
            problems += error.problems
    lost = sorted(listed - set(sizes))
    if lost and not problems:
        problems.append(
            f"{folder / INDEX}: names tensors that no file holds: {', '.join(lost[:4])}; get the model anew"
        )
    if problems:
        raise UserError(*problems)
    return Weights(sum(sizes.values()), frozenset(sizes))


def check_tokenizer(folder: Path, key: str, needs_template: bool) -> None:
    """Raises UserError if there is no tokenizer, or no chat template although one is needed."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{folder}: no tokenizer (such as tokenizer.json); set {key} to a folder that has one")
    described = folder / "tokenizer_config.json"
    if needs_template and described.is_file():
        own = read_json(described).get("chat_template")
        files = (folder / "chat_template.jinja", folder / "chat_template.json", folder / "additional_chat_templates")
        if not own and not any(path.exists() for path in files):
            raise UserError(f"{folder}: the tokenizer has no chat template (a base model?); set data.chat_template")


def _weight_files(folder: Path) -> tuple[list[Path], set[str]]:
    """The files to read and the tensor names that an index promises."""
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{index}: expected a `weight_map` from tensor to file name; get the file anew")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise UserError(f"{index}: expected plain file names, got {outside[0]!r}; get the file anew")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(*(f"{index}: {name} is not in the folder; get it anew" for name in missing))
        return [folder / name for name in names], set(weight_map)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if any(path for pattern in PICKLES for path in folder.glob(pattern)):
            raise UserError(f"{folder}: only pickled weights (*.bin); pickle is never loaded: convert to safetensors")
        raise UserError(f"{folder}: no *.safetensors; put the weights there or set model.init to random")
    return files, set()


def _read_header(path: Path) -> dict[str, int]:
    """Elements of each tensor. Format: 8 bytes little-endian header length, JSON header, data to the end of file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _HEADER_LIMIT_BYTES):
            raise UserError(f"{path}: broken or truncated safetensors file ({size:,} bytes); get it anew")
        text = file.read(length)
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        elements = {name: math.prod(entry["shape"]) for name, entry in tensors.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise UserError(f"{path}: broken safetensors header; get the file anew") from None
    if size != 8 + length + end:
        raise UserError(f"{path}: expected {8 + length + end:,} bytes, got {size:,}: truncated; get the file anew")
    return elements
