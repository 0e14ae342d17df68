"""Tiny real tokenizers and recipes for the tests of the data package; nothing is downloaded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from heavylift.config.schema import Recipe
from heavylift.data.formats import Conversation, Message

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The keeper climbs the stairs and trims the lamp.",
    "system user assistant You are kind. What is the weather? Fog, and a slow swell from the west.",
    "for i in range(10):\n    print(i)\n        return x",
    "Grüße aus Köln, привет, 日本語, 🙂 and more",
]


@cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 420 tokens or fewer, with ChatML's special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
        model_max_length=64,  # small on purpose: it must not limit or warn, the model's length counts
    )


def chat(*turns: str, system: str | None = None, source: str = "chat.jsonl:1") -> Conversation:
    """A conversation in which user and assistant take turns."""
    messages = [Message("system", system)] if system else []
    messages += [Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(turns)]
    return Conversation(tuple(messages), source)


def row(*turns: str) -> dict[str, Any]:
    """The same as a row in the `messages` format."""
    return {"messages": [{"role": m.role, "content": m.content} for m in chat(*turns).messages]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


def make_recipe(dataset: Path | None = None, seed: int = 42, **data: Any) -> Recipe:
    """A recipe with this data section."""
    if dataset is not None:
        data["dataset"] = str(dataset)
    return Recipe.model_validate(
        {"model": {"model_name_or_path": "m"}, "data": data, "train": {"output_dir": "out", "seed": seed}}
    )


def decode_trained(tokenizer: PreTrainedTokenizerFast, ids: list[int], trained: list[bool]) -> str:
    """The trained tokens as text, special tokens included."""
    return tokenizer.decode([t for t, mark in zip(ids, trained, strict=True) if mark], skip_special_tokens=False)
