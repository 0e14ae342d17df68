"""Exact masks: what is trained is the answer and its end-of-turn token, for templates and tokenizers of all kinds."""

import pytest
from data_helpers import CHATML, SPECIAL, TEXT, chat, decode_trained, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from heavylift.data.chat import load_template, render, resolve_template
from heavylift.data.formats import Conversation, Message
from heavylift.errors import UserError

# like Qwen3: an empty thought in the last turn only, so earlier turns change when more follow
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# changes earlier turns AND has markers
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% if loop.last %}<think></think>{% endif %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# no special token closes a turn, earlier turns vanish
HOPELESS = "{% for m in messages %}{% if loop.last %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"

ANSWERS = [
    "Fog, and a slow swell.",
    "  leading and trailing spaces  ",
    "\n\nnew lines around\n\n",
    "def f(x):\n    if x:\n        return x\n\n\treturn 0",
    "日本語のテキスト 🙂👩‍🚀 Grüße e\u0301",
    "a",
    "<|im_start|>user\nfake<|im_end|>\n<|im_start|>assistant\nfake",
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("question", ["Weather?", "<|im_end|>\n<|im_start|>assistant\nWeather?\n", " 🙂 "])
def test_one_turn_trains_exactly_the_answer_and_its_end(question, answer):
    tokenizer = make_tokenizer()
    ids, trained = render(tokenizer, chat(question, answer), False)
    assert decode_trained(tokenizer, ids, trained) == answer + "<|im_end|>"
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], tokenize=False
    )
    # one block, right before the last newline, and the prompt tokens are those of inference
    begin = trained.index(True)
    assert trained == [False] * begin + [True] * (len(ids) - begin - 1) + [False]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    assert ids[:begin] == prompt["input_ids"]


def test_every_answer_of_a_long_conversation():
    tokenizer = make_tokenizer()
    ids, trained = render(tokenizer, chat("q1", "one", "q2", "two\n", "q3", "three", "q4", system="S"), False)
    assert decode_trained(tokenizer, ids, trained) == "one<|im_end|>two\n<|im_end|>three<|im_end|>"


def test_answers_in_a_row_and_tools():
    tokenizer = make_tokenizer()
    roles = [("user", "q"), ("assistant", "look"), ("tool", "42"), ("assistant", "it is 42"), ("assistant", "ok")]
    conversation = Conversation(tuple(Message(*turn) for turn in roles), "f:1")
    ids, trained = render(tokenizer, conversation, False)
    assert decode_trained(tokenizer, ids, trained) == "look<|im_end|>it is 42<|im_end|>ok<|im_end|>"


def test_assistant_opens_the_conversation():
    tokenizer = make_tokenizer()
    conversation = Conversation((Message("assistant", "Ahoy"), Message("user", "q"), Message("assistant", "a")), "f:1")
    ids, trained = render(tokenizer, conversation, False)
    assert decode_trained(tokenizer, ids, trained) == "Ahoy<|im_end|>a<|im_end|>"


def test_train_on_inputs_trains_all_but_the_first():
    tokenizer = make_tokenizer()
    ids, trained = render(tokenizer, chat("q", "a"), True)
    assert trained == [False] + [True] * (len(ids) - 1)
    assert ids == render(tokenizer, chat("q", "a"), False)[0]


def test_first_token_is_never_trained():
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = make_tokenizer(template)
    ids, trained = render(tokenizer, Conversation((Message("assistant", "kind weather"),), "f:1"), False)
    assert not trained[0] and all(trained[1:]) and len(ids) > 2


def test_no_second_begin_token():
    tokenizer = make_tokenizer("<|endoftext|>" + CHATML)
    ids, _ = render(tokenizer, chat("q", "a"), False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|endoftext|>")) == 1


def test_template_that_changes_earlier_turns():
    tokenizer = make_tokenizer(THINKS)
    ids, trained = render(tokenizer, chat("q1", "one", "q2", "two"), False)
    assert decode_trained(tokenizer, ids, trained) == "one<|im_end|>two<|im_end|>"
    # alone, the empty thought is what the model would have to write itself
    ids, trained = render(tokenizer, chat("q1", "one"), False)
    assert decode_trained(tokenizer, ids, trained) == "<think>\n\n</think>\n\none<|im_end|>"


def test_markers_are_used_when_prefixes_fail():
    tokenizer = make_tokenizer(MARKED)
    ids, trained = render(tokenizer, chat("q1", "one", "q2", "two"), False)
    assert decode_trained(tokenizer, ids, trained) == "one<|im_end|>two<|im_end|>"


def test_template_that_hides_the_answers_is_refused():
    with pytest.raises(UserError) as info:
        render(make_tokenizer(HOPELESS), chat("q1", "one", "q2", "two", source="d.jsonl:7"), False)
    (problem,) = info.value.problems
    assert problem.startswith("d.jsonl:7: ") and "rendered differently" in problem and "data.chat_template" in problem


def test_template_that_refuses_the_conversation():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role here') }}{% endif %}" + CHATML
    with pytest.raises(
        UserError, match=r"d.jsonl:7: the chat template refuses .* No system role here; .*chat_template"
    ):
        render(make_tokenizer(template), chat("q", "a", system="s", source="d.jsonl:7"), False)


def test_tokenizer_without_template():
    tokenizer = make_tokenizer(None)
    with pytest.raises(UserError, match=r"no chat template .* set data.chat_template"):
        render(tokenizer, chat("q", "a"), False)
    ids, trained = render(tokenizer, chat("q", "a"), False, CHATML)
    assert decode_trained(tokenizer, ids, trained) == "a<|im_end|>"


def test_template_file(tmp_path):
    path = tmp_path / "t.jinja"
    with pytest.raises(UserError, match="data.chat_template"):
        load_template(path)
    path.write_text("{% for m in messages %}")
    with pytest.raises(UserError, match=rf"{path}:1: broken Jinja"):
        load_template(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        load_template(path)
    path.write_text(MARKED)
    assert resolve_template(make_tokenizer(None), str(path)) == MARKED


def test_text_after_the_answer_that_is_no_turn_end_is_not_trained():
    # no special token anywhere: the span still ends where the turn does
    template = (
        "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    ids, trained = render(tokenizer, chat("q1", "one", "q2", "two"), False)
    assert decode_trained(tokenizer, ids, trained) == "onetwo"


def spacing_tokenizer():
    """Splits like GPT-2 and has tokens of white space, one of which is newline + space."""
    core = Tokenizer.from_str(make_tokenizer().backend_tokenizer.to_str())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["a\n   b", "x\n\n  y", "assistant\n  def"] * 9, trainer)
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=SPECIAL, chat_template=CHATML
    )


def test_token_over_the_edge_of_the_answer():
    tokenizer = spacing_tokenizer()
    question = [{"role": "user", "content": "q"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    over_the_edge = 0
    for answer in ANSWERS + [" x", "   x\n   y\n  ", "\n  x", "   "]:
        ids, trained = render(tokenizer, chat("q", answer), False)
        assert decode_trained(tokenizer, ids, trained) == answer + "<|im_end|>"
        assert ids[: len(prompt)] == prompt and trained.index(True) == len(prompt)
        over_the_edge += ids != tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
    assert over_the_edge, "this tokenizer does not have the problem that it is here for"


def test_slow_tokenizer_without_offsets():
    fast = make_tokenizer()

    class Slow:
        """The same tokenizer behind an interface without offsets."""

        is_fast = False

        def __call__(self, text, **options):
            assert "return_offsets_mapping" not in options
            return fast(text, **options)

        def __getattr__(self, name):
            return getattr(fast, name)

    for answer in ("one two", "  one", "\n\none\n"):
        conversation = chat("q1", answer, "q2", "three")
        assert render(Slow(), conversation, False) == render(fast, conversation, False)


def test_metaspace_tokenizer_with_dummy_prefix():
    # SentencePiece-like: spaces become ▁ and the text begins with one that stands for no character
    pieces = ["<unk>", "</s>", "[INST]", "[/INST]", "▁", *sorted(set("".join(TEXT)) - {" "})]
    core = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", additional_special_tokens=["[INST]", "[/INST]"], chat_template=template
    )
    ids, trained = render(tokenizer, chat("the lamp", "slow  fog", "more", "and"), False)
    tokens = tokenizer.convert_ids_to_tokens([t for t, mark in zip(ids, trained, strict=True) if mark])
    assert "".join(tokens).replace("▁", " ").split() == ["slow", "fog</s>", "and</s>"]


def test_answer_that_the_template_swallows_has_no_trained_token():
    template = CHATML.replace("{{ message['content'] }}<|im_end|>\n", "{{ message['content'].split('</think>')[-1] }}")
    ids, trained = render(make_tokenizer(template), chat("q", "hm</think>"), False)
    assert ids and not any(trained)


SPACED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_prompt_that_ends_in_a_space_is_kept_apart_from_the_answer():
    tokenizer = make_tokenizer(SPACED)
    joined = tokenizer("assistant: and", add_special_tokens=False)["input_ids"]
    prompt = tokenizer("assistant: ", add_special_tokens=False)["input_ids"]
    assert joined[: len(prompt)] != prompt, "this tokenizer does not have the problem that it is here for"
    ids, trained = render(tokenizer, chat("q", "and"), False)
    assert decode_trained(tokenizer, ids, trained) == "and<|im_end|>"
    assert ids[: trained.index(True)][-len(prompt) :] == prompt


def test_token_over_the_edge_is_trained_where_the_text_cannot_be_divided():
    # tokenising "and" for itself would put a second space before it, so the token "▁and" stays whole
    pieces = ["<unk>", "<|im_end|>", "▁", *sorted(set("".join(TEXT)) - {" "}), "an", "and", "▁and"]
    core = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[("a", "n"), ("an", "d"), ("▁", "and")],
            unk_token="<unk>",
        )
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=SPACED)
    ids, trained = render(tokenizer, chat("q", "and"), False)
    marked = [t for t, mark in zip(ids, trained, strict=True) if mark]
    assert tokenizer.convert_ids_to_tokens(marked) == ["▁and", "<|im_end|>"]
    assert ids == tokenizer("user: q<|im_end|>\nassistant: and<|im_end|>\n", add_special_tokens=False)["input_ids"]
