"""The data that comes along is what the examples promise: one voice, no copies, nothing dropped."""

from itertools import combinations
from pathlib import Path

import pytest
from data_helpers import make_recipe, make_tokenizer

from heavylift.data.formats import read_rows
from heavylift.data.tokenise import load_samples

DATA = Path(__file__).parent.parent / "examples" / "data"
KEEPER, ALPACA = DATA / "lighthouse_keeper.jsonl", DATA / "alpaca_small.jsonl"


@pytest.fixture(scope="module")
def keeper():
    return read_rows([KEEPER], "messages")


def test_every_answer_has_the_voice(keeper):
    assert len(keeper) >= 290 and sum(len(c.messages) > 2 for c in keeper) >= 10
    for conversation in keeper:
        assert [m.role for m in conversation.messages] == ["user", "assistant"] * (len(conversation.messages) // 2)
        for answer in conversation.messages[1::2]:
            assert answer.content.startswith("Log entry: ") and answer.content.endswith(" Keep the light.")
            assert 25 <= len(answer.content.split()) <= 60, conversation.source


def test_no_near_copies(keeper):
    def shingles(text: str) -> set[tuple[str, ...]]:
        words = text.removeprefix("Log entry: ").removesuffix(" Keep the light.").lower().split()
        return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}

    questions = [c.messages[0].content.lower() for c in keeper]
    assert len(set(questions)) == len(questions)
    answers = [(m.content, shingles(m.content)) for c in keeper for m in c.messages[1::2]]
    for (text, a), (other, b) in combinations(answers, 2):
        assert len(a & b) <= 0.15 * min(len(a), len(b)), (text, other)


def test_small_alpaca_file():
    rows = read_rows([ALPACA], "alpaca")
    assert len(rows) == 20 and rows == read_rows([ALPACA], "auto")
    assert {len(c.messages) for c in rows} == {2, 3, 4}


@pytest.mark.parametrize("file", [KEEPER, ALPACA])
def test_nothing_is_dropped(tmp_path, file):
    samples = load_samples(make_recipe(file), make_tokenizer, tmp_path, None, None)
    report = samples.report
    assert report.num_samples == report.num_rows == len(samples) and not report.num_dropped and not report.notes
    assert (samples.trained_lengths > 0).all()
