"""Reading rows: both formats, real line numbers, and one clear line for everything that can be wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_helpers import row, write_rows

from heavylift.data.formats import MAX_PROBLEMS_SHOWN, Message, read_rows
from heavylift.errors import UserError

GOOD = json.dumps(row("hi", "hello"))


def problems_of(path: Path, format: str = "auto") -> tuple[str, ...]:
    with pytest.raises(UserError) as info:
        read_rows([path], format)
    return info.value.problems


def test_messages_and_alpaca_mixed(tmp_path):
    alpaca = {
        "instruction": "Add",
        "input": "2 and 3",
        "output": "5",
        "system": "Be brief.",
        "history": [["hi", "hello"]],
    }
    path = write_rows(tmp_path / "mixed.jsonl", [row("a", "b", "c", "d"), alpaca, {"instruction": "q", "output": "o"}])
    first, second, third = read_rows([path], "auto")
    assert [m.role for m in first.messages] == ["user", "assistant"] * 2
    assert second.messages == (
        Message("system", "Be brief."),
        Message("user", "hi"),
        Message("assistant", "hello"),
        Message("user", "Add\n\n2 and 3"),
        Message("assistant", "5"),
    )
    assert third.messages == (Message("user", "q"), Message("assistant", "o"))
    assert third.source == f"{path}:3"


def test_several_files_keep_order_and_blank_lines_count(tmp_path):
    one = tmp_path / "one.jsonl"
    one.write_bytes(b"\xef\xbb\xbf\n" + GOOD.encode() + b"\r\n\n   \n" + GOOD.encode())
    two = write_rows(tmp_path / "two.jsonl", [row("x", "y")])
    assert [c.source for c in read_rows([two, one], "messages")] == [f"{two}:1", f"{one}:2", f"{one}:5"]


def test_line_separators_inside_text_do_not_shift_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    text = "one\u2028two\u0085three\x0cfour"
    path.write_text(json.dumps(row("q", text), ensure_ascii=False).replace("\\f", "\x0c") + "\n" + "oops\n", "utf-8")
    assert [p.split(": ")[0] for p in problems_of(path)][-1] == f"{path}:2"
    write_rows(path, [row("q", text), row("q", "a")])
    first, second = read_rows([path], "auto")
    assert first.messages[1].content == text and second.source == f"{path}:2"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"messages": [', "broken JSON at column 15: Expecting value"),
        ("[" + GOOD + "]", "expected a JSON object, got a list of 1; this looks like a JSON array"),
        ('[{"messages":', "broken JSON at column 14: Expecting value; this looks like a JSON array"),
        ("3", "expected a JSON object, got a number"),
        ("null", "expected a JSON object, got null"),
        ("[" * 100_000, "JSON that cannot be read"),
        ('{"text": "x"}', 'expected "messages", or "instruction" and "output", got \'text\''),
        ('{"conversations": []}', "ShareGPT"),
        ("{}", "got no keys"),
        ('{"messages": []}', '"messages" must be a list of turns, got an empty list'),
        ('{"messages": "hi"}', '"messages" must be a list of turns, got text'),
        ('{"messages": ["hi"]}', 'messages[0] must be an object with "role" and "content", got text'),
        ('{"messages": [{"content": "x"}]}', 'messages[0]: "role" must be one of system, user, assistant, tool'),
        ('{"messages": [{"role": "asistant", "content": "x"}]}', 'unknown role "asistant"'),
        ('{"messages": [{"role": "gpt", "content": "x"}]}', 'write "assistant"'),
        ('{"messages": [{"role": "human", "content": "x"}]}', 'write "user"'),
        ('{"messages": [{"role": "zzz", "content": "x"}]}', "use one of these"),
        ('{"messages": [{"role": "user"}]}', 'messages[0]: "content" is missing; add it'),
        ('{"messages": [{"role": "user", "content": null}]}', '"content" must be text, got null'),
        ('{"messages": [{"role": "user", "content": [1]}]}', '"content" must be text, got a list of 1'),
        ('{"messages": [{"role": "user", "content": " \\n"}]}', 'messages[0]: "content" is empty'),
        ('{"messages": [{"role": "user", "content": "a\\ud800b"}]}', "half a surrogate pair (\\ud800)"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant turn"),
        ('{"instruction": "x"}', '"output" is missing'),
        ('{"instruction": "x", "output": ""}', '"output" is empty'),
        ('{"instruction": "", "output": "x"}', '"instruction" is empty'),
        ('{"instruction": "x", "output": "y", "input": 3}', '"input" must be text, got a number'),
        ('{"instruction": "x", "output": "y", "history": "z"}', '"history" must be a list of'),
        ('{"instruction": "x", "output": "y", "history": [["z"]]}', "history[0] must be a pair"),
        ('{"instruction": "x", "output": "y", "history": [["z", ""]]}', 'history[0]: "answer" is empty'),
    ],
)
def test_bad_row(tmp_path, line, expected):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n", "utf-8")
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:3: ") and expected in problem and "; " in problem
    assert "\n" not in problem


def test_the_format_that_was_asked_for(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"instruction": "x", "output": "y"}])
    (problem,) = problems_of(path, "messages")
    assert '"messages" is missing' in problem and "data.format" in problem
    path = write_rows(tmp_path / "b.jsonl", [row("a", "b")])
    assert '"instruction" is missing' in problems_of(path, "alpaca")[0]


def test_not_utf8_names_line_and_byte(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + '{"instruction": "Grüße"}'.encode("latin-1"))
    assert problems_of(path)[0].startswith(f"{path}:2: not UTF-8 text (byte 20 of the line)")


def test_file_problems_are_collected(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("x\n")
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(UserError) as info:
        read_rows([tmp_path / "none.jsonl", tmp_path, pipe, empty, bad], "auto")
    missing, folder, no_file, nothing, broken = info.value.problems
    assert "found a pipe or device" in no_file
    assert "none.jsonl: no such file" in missing and "data.dataset" in missing
    assert "found a folder" in folder
    assert "empty data set" in nothing
    assert broken.startswith(f"{bad}:1: ")


def test_many_problems_are_capped(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("x\n" * 50)
    problems = problems_of(path)
    assert len(problems) == MAX_PROBLEMS_SHOWN + 1
    assert problems[-1] == "... and 30 more problems of this kind"
    assert problems[19].startswith(f"{path}:20: ")


def test_unicode_survives(tmp_path):
    text = "日本語 🙂 e\u0301 \u200b zero"
    path = write_rows(tmp_path / "u.jsonl", [row(text, text)])
    assert read_rows([path], "auto")[0].messages[1].content == text
    path.write_text(json.dumps(row(text, text)), "utf-8")  # the same with \u escapes and surrogate pairs
    assert read_rows([path], "auto")[0].messages[1].content == text


def test_import_needs_neither_torch_nor_transformers():
    heavy = "{'torch', 'transformers', 'numpy', 'rich'}"
    code = f"import sys, heavylift.data.formats; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
