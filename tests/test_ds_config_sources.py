"""Where a ds_config comes from: mappings, files with comments, Hjson, base64; what cannot be read is one line."""

from __future__ import annotations

import base64
import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from heavylift.config.deepspeed.parse import load_settings
from heavylift.config.deepspeed.places import key_lines
from heavylift.config.deepspeed.sources import parse_json, read_source
from heavylift.errors import UserError

CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


def refusal(source: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_source(source)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


def test_mapping_path_and_base64_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG | {"log_level": "~~~???"}).encode()).decode()
    assert "-" in encoded or "_" in encoded  # the urlsafe alphabet is really used
    expected = load_settings(CONFIG, 2)
    assert load_settings(path, 2) == load_settings(str(path), 2) == expected
    assert load_settings(encoded, 2).batch == expected.batch


def test_messages_begin_with_the_source(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n"train_batch_size": "x"}')
    for source, name in ((path, f"{path}:2"), ({"train_batch_size": "x"}, "ds_config")):
        with pytest.raises(UserError) as caught:
            load_settings(source, 1)
        assert caught.value.problems[0].startswith(f"{name}: train_batch_size: ")


LINES = """{
  // zero_optimization: {"foo": 1},
  "train_micro_batch_size_per_gpu": 1, "zero_optimization": {
    "stage": 2, /* a comment of
    two lines */ "foo": 1,
    "stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 2,
    "offload_param": {"device": "cpu"},
  },
  "tensor_parallel": {"partition_config": {"layer_specs": [{"shape": [1, {"zero_optimization": 1}]}, "stage"]}},
  "a.b": {"stage": "\\",: {}\\"", "": 1},

  "scheduler": {
    "type": "WarmupDecayLR"},
  "train_batch_size": 7.5
}"""
PLACES = {
    "zero_optimization.foo": 5,
    "zero_optimization.prefetch_bucket_size": 6,
    "zero_optimization.offload_param.device": 7,
    "a.b": 10,
    "scheduler.params.total_num_steps": 12,  # missing: its block's
    "train_batch_size": 14,
}


def test_problems_have_the_line_of_their_key(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(LINES)
    with pytest.raises(UserError) as caught:
        load_settings(path, 1)
    # from top to bottom
    assert [problem.split(": ")[:2] for problem in caught.value.problems] == [
        [f"{path}:{line}", key] for key, line in PLACES.items()
    ]


def test_the_batch_equation_has_the_line_of_a_key_in_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for text, place in (('{\n"gradient_accumulation_steps": 2}', f"{path}:2"), ("{\n}", str(path))):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            load_settings(path, 1)
        assert caught.value.problems[0].startswith(f"{place}: train_batch_size: ")


def test_key_lines_are_those_of_the_parsed_keys() -> None:
    """A text that has one key on each line."""
    value = {"a": {"b": [{"x": [[]]}, "b", {}], "c": {}}, '"': {"{": 1, "d": "]"}, "e": [1, "e"], "f": {"b": None}}
    text = json.dumps(value, indent=1)
    lines = key_lines(text)
    assert list(lines) == ["a", "a.b", "a.c", '"', '".{', '".d', "e", "f", "f.b"]
    for path, line in lines.items():
        assert text.splitlines()[line - 1].strip().startswith(json.dumps(path.split(".")[-1]) + ":")


def test_hjson_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text("{\n  train_batch_size: 1\n  foo: 1\n}")
    with pytest.raises(UserError) as caught:
        load_settings(path, 1)
    assert caught.value.problems[0].startswith(f"{path}: foo: unknown key")


def test_comments_and_trailing_commas_without_hjson(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_hjson(monkeypatch)
    text = """// first
    { # here, {"too": 1},
      "a": "// no, /* not */ a # comment", /* one,
      and a second line } */
      "b": [1, 2, /* 3, */ ], // 4 ]
      "c": {"d": "quote \\" and // more",
      }, # end
      // "e": 5,
    }"""
    assert parse_json(text, "f") == {
        "a": "// no, /* not */ a # comment",
        "b": [1, 2],
        "c": {"d": 'quote " and // more'},
    }


def test_all_of_hjson() -> None:
    pytest.importorskip("hjson")
    text = """{
      train_micro_batch_size_per_gpu: 2
      zero_optimization: {
        stage: 2
      }
    }"""
    assert parse_json(text, "f") == CONFIG


def test_hjson_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_hjson(monkeypatch)
    with pytest.raises(UserError) as caught:
        parse_json("{\n  stage: 2\n}", "ds.json")
    assert caught.value.problems[0].startswith("ds.json:2:3: not valid JSON: ")
    assert "pip install 'heavylift[deepspeed]'" in caught.value.problems[0]


BROKEN = {
    '{"a": [1, 2}': ":1:12: not valid JSON",
    '{"a": "unfinished': ":1:7: not valid JSON",
    '{"a": 1} }': ":1:10: not valid JSON",
}
BROKEN_WITHOUT_HJSON = {'{\n  "a": 1\n  "b": [2\n}': ":3:3: not valid JSON"}
"""Hjson reads more of these."""


def test_syntax_errors_have_line_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_hjson(monkeypatch)
    for text, place in (BROKEN | BROKEN_WITHOUT_HJSON).items():
        _has_syntax_error(text, place)


def test_syntax_errors_have_line_and_column_with_hjson_too() -> None:
    pytest.importorskip("hjson")
    for text, place in BROKEN.items():
        _has_syntax_error(text, place)


def _has_syntax_error(text: str, place: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_json(text, "ds.json")
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"ds.json{place}"), caught.value.problems


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"a": 1, "a": 2}]', "a: given twice in one block; remove one"),
        ("", "is empty; expected a ds_config.json"),
        ("// nothing\n", "is empty; expected a ds_config.json"),
        ("[1]", "expected a mapping ({...}), got a list"),
        ("3", "expected a mapping ({...}), got 3"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "a number of thousands of digits"),
    ],
)
def test_other_bad_texts(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_json(text, "ds.json")
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("ds.json: ") and said in caught.value.problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "ds.json:1: a: given twice in one block, first on line 1; remove one"),
        ('{"b": {"a": 1, // x\n "a": 2}}', "ds.json:2: b.a: given twice in one block, first on line 1; remove one"),
        (
            '{"a": {"x": 1},\n "b": {"x": 1,\n "c": [1, {"x": 2}],\n "x": 2}, "x": 3}',
            "ds.json:4: b.x: given twice in one block, first on line 2; remove one",
        ),
        ('{"b": {"a": 1},\n\n"b": {"a": 1}}', "ds.json:3: b: given twice in one block, first on line 1; remove one"),
    ],
)
def test_a_key_given_twice_is_told_with_its_block_and_its_lines(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_json(text, "ds.json")
    assert str(caught.value) == said


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.json") == f"{tmp_path / 'no.json'}: no such file; give the path of a ds_config.json"
    assert "no such file, nor base64 of JSON" in refusal("no.json")
    assert "no such file, nor base64 of JSON" in refusal(base64.b64encode(b"hello there").decode())
    assert "no such file, nor base64 of JSON" in refusal("a\0b")
    assert "no such file, nor base64 of JSON" in refusal("")
    assert refusal(tmp_path) == f"{tmp_path}: expected a ds_config.json, got a folder"
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    assert refusal(tmp_path / "latin.json").endswith("expected UTF-8 text, got byte 0xe9")
    for wrong in (None, 3, [CONFIG]):
        assert refusal(wrong).startswith("ds_config: expected a mapping, a path or base64 text, got ")


def test_base64_of_bad_json_says_so() -> None:
    encoded = base64.urlsafe_b64encode(b'{"a": [1, 2}').decode()
    assert refusal(encoded).startswith("ds_config (base64):1:12: not valid JSON")


def _without_hjson(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "hjson":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
