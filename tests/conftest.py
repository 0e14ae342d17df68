"""Fixtures for every test: tiny real model folders, built offline, and the command as a subprocess."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# the same examples in every run, so that a change is judged by what it changes; HYPOTHESIS_PROFILE=search tries others
settings.register_profile("same", derandomize=True)
settings.register_profile("search")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = [
    "The keeper climbs the stairs of the lighthouse every evening and lights the lamp.",
    "How do I boil an egg? Put it into boiling water for seven minutes.",
    "system user assistant What is the capital of France? Paris is the capital of France.",
]


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Else it is a later test that fails, in a run of the whole suite only."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a process group in pytest's own process")


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    rc: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The `error:` lines, without that word."""
        return [line.removeprefix("error: ") for line in self.stderr.splitlines() if line.startswith("error: ")]


def heavylift_command() -> list[str]:
    """The installed command of this Python, or its module where the package is run from its sources."""
    installed = Path(sys.executable).parent / "heavylift"
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "heavylift"]


def command_env(**more: str) -> dict[str, str]:
    """The environment without a surrounding launcher's variables, one thread per process, no network."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HEAVYLIFT_DEBUG")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    # the package's sources, for a test run without an installation
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(part for part in (root, env.get("PYTHONPATH", "")) if part)
    return {**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


@pytest.fixture(scope="session")
def run_heavylift() -> Callable[..., Finished]:
    """`run_heavylift(*args, cwd=None, env=None, timeout=300)` runs the installed command; returns a `Finished`."""

    def run(
        *args: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 300
    ) -> Finished:
        done = subprocess.run(
            [*heavylift_command(), *map(str, args)],
            cwd=cwd,
            env=command_env(**(env or {})),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


def save_tiny_tokenizer(folder: Path) -> int:
    """A byte-level BPE tokenizer with a ChatML template in `folder`; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=specials, initial_alphabet=alphabet)
    bpe.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_tiny_llama(folder: Path, tied: bool) -> Path:
    """A random 2-layer Llama (hidden 32, 4 heads, 2 KV heads, float32) and its tokenizer in `folder`."""
    from ranks.llamas import llama_config, save_llama  # not at the top: that would import torch

    vocab_size = save_tiny_tokenizer(folder)
    special = {"eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0}
    config = llama_config(vocab_size, 32, 64, 2, 4, 2, tied=tied, max_position_embeddings=128, **special)
    return save_llama(folder, config)


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama folder with an lm_head of its own. Shared by all tests: never write into it."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"), tied=False)


@pytest.fixture(scope="session")
def tiny_llama_tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with tied embeddings (no lm_head in its file)."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama_tied"), tied=True)


@pytest.fixture
def tiny_llama_copy(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A copy of the untied folder that a test may damage."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "tiny_llama"))


@pytest.fixture(scope="session")
def chat_rows() -> list[dict[str, object]]:
    """Eight rows in `messages` form that fit the tiny model."""
    asked = ["How are you?", "Boil an egg?", "Capital of France?", "Lamp?", "Tide?", "Fog?", "Gulls?", "Stairs?"]
    return [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": f"Log {i}: the lamp is lit."}]}
        for i, q in enumerate(asked)
    ]


@pytest.fixture
def chat_file(tmp_path: Path, chat_rows: list[dict[str, object]]) -> Path:
    """`chat_rows` as a JSON-lines file."""
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chat_rows), encoding="utf-8")
    return path


@pytest.fixture
def write_recipe(tmp_path: Path, tiny_llama_dir: Path, chat_file: Path) -> Callable[..., Path]:
    """`write_recipe(**sections)` writes a recipe for a short run of the tiny model and returns its path.

    A section given replaces or adds single keys; a value None removes the key.
    """
    import yaml

    def write(**sections: dict[str, object]) -> Path:
        recipe: dict[str, dict[str, object]] = {
            "model": {"model_name_or_path": str(tiny_llama_dir)},
            "data": {"dataset": str(chat_file)},
            "train": {"output_dir": str(tmp_path / "run"), "max_steps": 2},
            "launch": {"nproc": 1},
        }
        for name, values in sections.items():
            merged = {**recipe.get(name, {}), **values}
            recipe[name] = {key: value for key, value in merged.items() if value is not None}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
        return path

    return write
