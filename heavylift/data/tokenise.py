"""Makes the `SampleSet` of a recipe: rows -> chat text -> token ids, with the length limit and the checks.

Runs before process groups exist and talks to no other process except through the cache's lock file.
Left out: reading rows (`formats`), finding the answers (`chat`), storing (`cache`), batches (`batches`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import transformers
from rich.console import Console
from rich.progress import track

from heavylift.config.schema import DataConfig, Recipe
from heavylift.data.cache import cached_samples
from heavylift.data.chat import render, resolve_template
from heavylift.data.formats import MAX_PROBLEMS_SHOWN, Conversation, capped, read_rows
from heavylift.data.report import MAX_DROPPED_LISTED, DataReport
from heavylift.data.samples import STREAM_RANDOM_TOKENS, SampleSet, raw_bits
from heavylift.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# part of the cache key: raise it whenever the same input would give other samples
FORMAT_VERSION = 1

Sample = tuple[list[int], list[bool]]


def load_samples(
    recipe: Recipe,
    tokenizer_loader: Callable[[], PreTrainedTokenizerBase],
    cache_dir: Path,
    model_max_len: int | None,
    vocab_size: int | None,
) -> SampleSet:
    """The whole tokenised data set of `recipe.data`, before the validation split.

    `model_max_len`: longest sequence that the model takes, in tokens; `vocab_size`: rows of its embedding; None means
    unknown. With `format: random` `tokenizer_loader` is not called and `vocab_size` is needed. Raises UserError for
    rows, lengths, templates and tokenizers that do not fit, naming `file:line` and the key to change.
    """
    data = recipe.data
    if data.format == "random":
        return _random_samples(data, recipe.train.seed, model_max_len, vocab_size)
    tokenizer = tokenizer_loader()
    template = resolve_template(tokenizer, data.chat_template)
    limit = min((n for n in (data.cutoff_len, model_max_len) if n is not None), default=None)
    key = _cache_key(data, tokenizer, template, limit)
    samples = cached_samples(cache_dir, key, lambda: _tokenise(data, tokenizer, template, limit))
    if vocab_size is not None and (largest := int(samples.tokens.max())) >= vocab_size:
        raise UserError(
            f"the tokenizer makes token id {largest}, the model's embedding has only {vocab_size} rows; they do not "
            "belong together: correct model.tokenizer_name_or_path or model.model_name_or_path"
        )
    if data.cutoff_len is not None and limit is not None and limit < data.cutoff_len:
        note = f"the model takes {limit:,} tokens, less than data.cutoff_len {data.cutoff_len:,}; {limit:,} is used"
        samples = replace(samples, report=replace(samples.report, notes=(*samples.report.notes, note)))
    return samples


def _tokenise(data: DataConfig, tokenizer: PreTrainedTokenizerBase, template: str, limit: int | None) -> SampleSet:
    assert data.format != "random", data
    conversations = read_rows([Path(file) for file in data.files], data.format)[: data.num_samples]
    rendered = _render_all(conversations, tokenizer, template, data.train_on_inputs)
    kept: list[Sample] = []
    dropped: list[tuple[str, str]] = []
    overlong: list[str] = []
    num_cut = 0
    for conversation, (ids, trained) in zip(conversations, rendered, strict=True):
        source, length = conversation.source, len(ids)
        cut = limit is not None and length > limit
        if cut and data.overlong == "error":
            overlong.append(
                f"{source}: {length} tokens, more than the {limit} allowed; raise data.cutoff_len (if the model "
                "takes more), or set data.overlong to drop or truncate"
            )
        elif cut and data.overlong == "drop":
            dropped.append((source, f"{length} tokens, more than {limit}"))
        elif not any(trained[:limit]):
            why = f"no trained token in the first {limit} of {length} tokens" if cut else "no trained token"
            dropped.append((source, why))
        else:
            kept.append((ids[:limit], trained[:limit]))
            num_cut += cut
    if overlong:
        raise UserError(*capped(overlong))
    if not kept:
        reasons = "; ".join(f"{source}: {why}" for source, why in dropped[:3])
        raise UserError(
            f"{', '.join(data.files)}: none of the {len(conversations)} rows leaves a token to train on ({reasons}); "
            "raise data.cutoff_len, or check the data and data.chat_template"
        )
    report = DataReport(
        sources=data.files,
        num_rows=len(conversations),
        num_samples=len(kept),
        num_dropped=len(dropped),
        dropped=tuple(dropped[:MAX_DROPPED_LISTED]),
        num_cut=num_cut,
        cutoff_len=limit,
        num_tokens=sum(len(ids) for ids, _ in kept),
        num_trained_tokens=sum(sum(trained) for _, trained in kept),
        longest=max(len(ids) for ids, _ in kept),
        train_on_inputs=data.train_on_inputs,
        sample=_decode_pieces(tokenizer, kept[0]),
        notes=() if data.train_on_inputs else _stop_note(tokenizer, rendered),
    )
    return SampleSet.from_lists(kept, report)


def _render_all(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, template: str, train_on_inputs: bool
) -> list[Sample]:
    console = Console(stderr=True)
    bar = track(
        conversations, description="tokenising", console=console, transient=True, disable=not console.is_terminal
    )
    samples: list[Sample] = []
    problems: list[str] = []
    for conversation in bar:
        try:
            samples.append(render(tokenizer, conversation, train_on_inputs, template))
        except UserError as error:
            problems += error.problems
            # rendering is slow: an unsuitable template would fail on every one of a million rows
            if len(problems) == MAX_PROBLEMS_SHOWN:
                problems.append(f"... stopped after {MAX_PROBLEMS_SHOWN} problems")
                break
    if problems:
        raise UserError(*problems)
    return samples


def _decode_pieces(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> tuple[tuple[str, bool], ...]:
    """The sample as (text, trained) pieces, special tokens shown."""
    pieces = groupby(zip(*sample, strict=True), key=lambda pair: pair[1])
    return tuple(
        (
            str(
                tokenizer.decode(
                    [token for token, _ in group], skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            ),
            trained,
        )
        for trained, group in pieces
    )


def _stop_note(tokenizer: PreTrainedTokenizerBase, rendered: Sequence[Sample]) -> tuple[str, ...]:
    """Says so if answers do not end with a special token: the model would learn to talk on and on."""
    added = set(tokenizer.get_added_vocab().values())
    last = (next((ids[t] for t in reversed(range(len(ids))) if trained[t]), None) for ids, trained in rendered)
    if any(token is not None and token not in added for token in last):
        return ("the chat template closes answers without an end-of-turn token; the model will not learn to stop",)
    return ()


def _cache_key(data: DataConfig, tokenizer: PreTrainedTokenizerBase, template: str, limit: int | None) -> str:
    """Hash of everything that the samples depend on."""
    if tokenizer.is_fast:
        vocabulary = tokenizer.backend_tokenizer.to_str()
    else:
        vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), repr(tokenizer)])
    parts = {
        "version": FORMAT_VERSION,
        "transformers": transformers.__version__,
        "files": [(file, _digest(Path(file))) for file in data.files],
        "tokenizer": [type(tokenizer).__name__, hashlib.sha256(vocabulary.encode()).hexdigest()],
        # templates print these
        "special": {name: str(value) for name, value in sorted(tokenizer.special_tokens_map.items())},
        "template": template,
        "limit": limit,
        "options": [data.format, data.overlong, data.train_on_inputs, data.num_samples],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return "unreadable"  # read_rows, which comes next, says what is wrong with it


def _random_samples(data: DataConfig, seed: int, model_max_len: int | None, vocab_size: int | None) -> SampleSet:
    num, length = data.num_samples, data.cutoff_len
    assert num is not None and length is not None, "the schema asks for both"
    assert vocab_size is not None and 0 < vocab_size < 2**31, vocab_size
    if model_max_len is not None and length > model_max_len:
        raise UserError(f"data.cutoff_len: {length} tokens, the model takes {model_max_len}; lower data.cutoff_len")
    tokens = (raw_bits(num * length, seed, STREAM_RANDOM_TOKENS) % np.uint64(vocab_size)).astype(np.int32)
    trained = np.ones((num, length), np.bool_)
    trained[:, 0] = False
    report = DataReport(
        sources=(f"random tokens (seed {seed})",),
        num_rows=num,
        num_samples=num,
        cutoff_len=length,
        num_tokens=num * length,
        num_trained_tokens=num * (length - 1),
        longest=length,
        train_on_inputs=True,
    )
    return SampleSet(tokens, trained.reshape(-1), np.arange(num + 1, dtype=np.int64) * length, report)
