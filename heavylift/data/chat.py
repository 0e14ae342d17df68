"""From a conversation to token ids and a mark per token: is it trained?

Only assistant turns are trained, with the end-of-turn token (so that the model learns to stop) but without the white
space after it. Chat templates rarely say which part is which, so the parts are found by rendering: the prompt of
turn i is what the template makes of the messages before it plus the generation prompt, just as in inference.

Order of attempts: prefixes; `{% generation %}` markers of the template; a probe that swaps the answer for a marker.
Left out: tool schemas, images, packing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from heavylift.data.formats import Conversation
from heavylift.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%-?\+?\s*generation\b")
_PROBE = "\ue000answer\ue001"  # private-use characters: no template treats them specially

Span = tuple[int, int]


class _CannotLocate(Exception):
    """This way of finding the assistant's part does not work with this template."""


def load_template(path: str | Path) -> str:
    """The Jinja chat template in `path`. Raises UserError if it cannot be read or parsed."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: expected a Jinja chat template, {reason}; correct data.chat_template") from None
    try:
        # the tag `generation` is an extension of transformers: plain Jinja would refuse it
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            re.sub(r"\{%-?\+?\s*(end)?generation\s*[-+]?%\}", "", text)
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: broken Jinja: {error.message}; correct the chat template") from None
    return text


def resolve_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str:
    """The template in use: that of the file `path`, else the tokenizer's own. Raises UserError if there is none."""
    if path is not None:
        return load_template(path)
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise UserError(
            f"{name}: has no chat template (a base model?); set data.chat_template to a file with a Jinja template"
        ) from None


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    train_on_inputs: bool,
    template: str | None = None,
) -> tuple[list[int], list[bool]]:
    """Token ids and trained marks of one conversation, both of length n >= 1.

    `trained[t]` is about predicting token t from the tokens before it; it is false for t = 0. `template` replaces the
    tokenizer's own. Raises UserError if the template refuses the conversation or hides where the answers are.

    Where a token would reach over the edge of an answer (answers that begin with spaces or newlines), prompt and
    answer are tokenised apart, as they are in inference.
    """
    if template is None:
        template = resolve_template(tokenizer, None)
    turns = [{"role": message.role, "content": message.content} for message in conversation.messages]
    try:
        text = _render_text(tokenizer, turns, template)
    except _CannotLocate as error:
        raise UserError(
            f"{conversation.source}: the chat template refuses this conversation: {error}; "
            "change the row, or the template (data.chat_template)"
        ) from None
    if train_on_inputs:
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        trained = [True] * len(ids)
    else:
        ids, trained = _answers_only(tokenizer, turns, text, template, conversation.source)
    if not ids:
        raise UserError(f"{conversation.source}: the chat template made no text of it; check data.chat_template")
    trained[0] = False
    return ids, trained


def _render_text(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, str]], template: str, prompt: bool = False
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                list(turns), chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
        )
    except (jinja2.TemplateError, TypeError, IndexError, KeyError, ValueError, AttributeError) as error:
        # a template is a program: besides its own raise_exception it can fail in any of these ways
        raise _CannotLocate(str(error) or type(error).__name__) from None


def _answers_only(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], text: str, template: str, source: str
) -> tuple[list[int], list[bool]]:
    reasons = []
    try:
        spans = _spans_by_prefix(tokenizer, turns, text, template)
        return _mark(tokenizer, text, spans)
    except _CannotLocate as error:
        reasons.append(str(error))
    if _GENERATION_MARKER.search(template) and tokenizer.is_fast:
        return _by_markers(tokenizer, turns, template)
    try:
        return _mark(tokenizer, text, _spans_by_probe(tokenizer, turns, text, template))
    except _CannotLocate as error:
        reasons.append(str(error))
    raise UserError(
        f"{source}: cannot tell the answers from the prompt in what the chat template makes of it "
        f"({'; '.join(reasons)}); set data.chat_template to a template with {{% generation %}} markers, "
        "or data.train_on_inputs to true"
    )


def _spans_by_prefix(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], text: str, template: str
) -> list[Span]:
    """Character spans of the answers in `text`: what turn i adds to its own generation prompt."""
    spans = []
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        until = text if i == len(turns) - 1 else _render_text(tokenizer, turns[: i + 1], template)
        if not text.startswith(until):
            raise _CannotLocate(f"turn {i} is rendered differently when more turns follow")
        prompt = _render_text(tokenizer, turns[:i], template, prompt=True)
        if not until.startswith(prompt):
            raise _CannotLocate(f"turn {i} does not begin with its own generation prompt")
        # the end-of-turn token is the last thing that is not white space
        spans.append((len(prompt), max(len(prompt), len(until.rstrip()))))
    return spans


def _spans_by_probe(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], text: str, template: str
) -> list[Span]:
    """The same by swapping each answer for a probe: what stands before and after it is not the answer's.

    The last resort, for templates that change earlier turns: it cannot see template text that belongs to the answer,
    except the end-of-turn token, which must follow at once.
    """
    special = sorted((token for token in tokenizer.get_added_vocab() if token), key=len, reverse=True)
    spans = []
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        probed = _render_text(tokenizer, [*turns[:i], {**turn, "content": _PROBE}, *turns[i + 1 :]], template)
        before, found, after = probed.partition(_PROBE)
        if not found or _PROBE in after or not (text.startswith(before) and text.endswith(after)):
            raise _CannotLocate(f"turn {i} changes the text around it")
        gap = len(after) - len(after.lstrip())
        end_token = next((token for token in special if after.startswith(token, gap)), None)
        if end_token is None:
            raise _CannotLocate(f"turn {i} is not closed by an end-of-turn token")
        spans.append((len(before), len(text) - len(after) + gap + len(end_token)))
    return spans


def _mark(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """Tokenises `text` and marks the tokens that cover characters of `spans` (ascending, disjoint)."""
    if not tokenizer.is_fast:
        return _mark_slow(tokenizer, text, spans)
    # the template has written the special tokens already: adding them again would double the first one
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    token_ends = {token_end for _, token_end in offsets}
    clean = token_ends.issuperset(edge for span in spans for edge in span if edge)
    # some tokenizers leave white space out of the offsets, so a token can reach into it unseen
    if not clean or any(text[begin : begin + 1].isspace() for begin, _ in spans):
        if (apart := _mark_apart(tokenizer, text, spans, ids)) is not None:
            return apart
    trained = [False] * len(ids)
    remaining = iter([*spans, (len(text), len(text))])
    begin, end = next(remaining)
    for t, (token_begin, token_end) in enumerate(offsets):
        while token_begin >= end and end < len(text):
            begin, end = next(remaining)
        # byte-level tokenizers give tokens of spaces an empty range at their end: only `token_end` may be strict there
        trained[t] = token_end > begin and token_begin < end
    return ids, trained


def _mark_apart(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span], whole: list[int]
) -> tuple[list[int], list[bool]] | None:
    """Prompts and answers tokenised each for itself, as in inference: there the prompt ends before the answer exists.

    None if that changes the text: tokenizers with a dummy prefix put a space in front of each piece. `whole` are the
    ids of the undivided text.
    """
    ids: list[int] = []
    trained: list[bool] = []
    position = 0
    for begin, end in [*spans, (len(text), len(text))]:
        for piece, mark in ((text[position:begin], False), (text[begin:end], True)):
            new = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"] if piece else []
            ids += new
            trained += [mark] * len(new)
        position = end
    same = tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(whole, skip_special_tokens=False)
    return (ids, trained) if same else None


def _mark_slow(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """The same without offsets: the text up to each edge must tokenise to a prefix of the whole, or be apart."""
    ids: list[int] = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    trained = [False] * len(ids)
    for span in spans:
        heads = [tokenizer(text[:edge], add_special_tokens=False, verbose=False)["input_ids"] for edge in span]
        if any(ids[: len(head)] != head for head in heads):
            if (apart := _mark_apart(tokenizer, text, spans, ids)) is not None:
                return apart
            raise _CannotLocate("this slow tokenizer gives no character offsets and merges across the answer's edge")
        for t in range(len(heads[0]), len(heads[1])):
            trained[t] = True
    return ids, trained


def _by_markers(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], template: str
) -> tuple[list[int], list[bool]]:
    encoded: Any = tokenizer.apply_chat_template(
        turns, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
