"""Recipes: parsing, overrides, messages with line numbers, and that no input whatever ends in a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heavylift.config.recipe import dump_recipe, load_recipe
from heavylift.config.schema import Recipe, Tier
from heavylift.config.words import expected, sections, shown
from heavylift.errors import UserError

GOOD = """\
model:
  model_name_or_path: models/llama
data:
  dataset: chat.jsonl
train:
  output_dir: runs/one
"""


def load(tmp_path: Path, text: str | bytes, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_recipe(path, overrides)


def problems(tmp_path: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The problems with the folder's name taken off."""
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, *overrides)
    return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_a_ds_config_is_told_as_one(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, '{\n"train_batch_size": 8,\n"zero_optimization": {"stage": 2}}')
    assert line.startswith("recipe.yaml: expected a recipe, got a ds_config.json;") and "config convert" in line
    assert len(problems(tmp_path, GOOD + "zero_optimization:\n  stage: 2\n")) == 1  # a recipe with a wrong section


def test_defaults_and_values(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert recipe.model.model_name_or_path == "models/llama"
    assert recipe.data.files == ("chat.jsonl",)
    assert recipe.train.learning_rate == 1e-5 and recipe.engine.zero_stage == 3
    assert recipe.output_dir == Path("runs/one")


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "0.00001", "'1e-5'", "+1e-5"])
def test_numbers_as_people_write_them(tmp_path: Path, text: str) -> None:
    recipe = load(tmp_path, GOOD + f"  learning_rate: {text}\n")
    assert recipe.train.learning_rate == 1e-5
    assert load(tmp_path, GOOD, f"train.learning_rate={text}") == recipe


def test_run_names_are_no_dates_or_octal_numbers(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD.replace("runs/one", "2026-01-31")).train.output_dir == "2026-01-31"
    assert load(tmp_path, GOOD + "  max_steps: 010\n").train.max_steps == 10


def test_overrides_win_in_order(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        GOOD + "  max_steps: 5\n",
        "train.max_steps=6",
        "train.max_steps=7",
        "engine.offload_optimizer=cpu",
        "data.dataset=[a.jsonl, b.jsonl]",
        "eval.sample_prompt=Why: because?",
        "train.output_dir=2026",
        "model.tokenizer_name_or_path=null",
    )
    assert recipe.train.max_steps == 7
    assert recipe.engine.offload_optimizer is Tier.HOST
    assert recipe.data.files == ("a.jsonl", "b.jsonl")
    assert recipe.eval.sample_prompt == "Why: because?"
    assert recipe.train.output_dir == "2026"
    assert recipe.model.tokenizer_name_or_path is None


def test_override_repairs_a_bad_value(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD + "  max_steps: many\n", "train.max_steps=3").train.max_steps == 3


def test_commented_out_section_and_anchors(tmp_path: Path) -> None:
    text = GOOD + "engine:\n  # ratio: 0.5\nexport: &e\n  dtype: float32\n"
    assert load(tmp_path, text).export.dtype == "float32"
    merged = GOOD + "  <<: {seed: 7}\n"
    assert load(tmp_path, merged).train.seed == 7


def test_every_problem_is_named_with_its_line(tmp_path: Path) -> None:
    text = GOOD + (
        "  max_steps: yes\n"
        "  lr_scheduler_type: cosin\n"
        "  dataset: x\n"
        "  warmup_ration: 0.1\n"
        "engine:\n"
        "  zero_stage: true\n"
        "  ratio: 1.5\n"
        "lauch: {nproc: 2}\n"
    )
    assert problems(tmp_path, text, "train.seed=-1", "engin.ratio=1", "ratio=1", "oops") == [
        "recipe.yaml:7: train.max_steps: expected a whole number ≥ 1, got true",
        "recipe.yaml:8: train.lr_scheduler_type: expected one of cosine, linear, constant, wsd, got 'cosin'",
        "recipe.yaml:9: train.dataset: unknown key; did you mean data.dataset?",
        "recipe.yaml:10: train.warmup_ration: unknown key; did you mean train.warmup_ratio?",
        "recipe.yaml:12: engine.zero_stage: expected one of 0, 1, 2, 3, got true",
        "recipe.yaml:13: engine.ratio: expected a number from 0 to 1 or auto, got 1.5",
        "recipe.yaml:14: lauch: unknown section; did you mean launch?",
        "command line: engin.ratio: unknown section; did you mean engine.ratio?",
        "command line: ratio: unknown section; did you mean engine.ratio?",
        "command line: expected section.key=value, got 'oops'",
        "command line: train.seed: expected a whole number ≥ 0 and < 4294967296, got -1",
    ]


def test_missing_keys_and_sections(tmp_path: Path) -> None:
    assert problems(tmp_path, "model: {}\ntrain:\n  seed: 1\n") == [
        "recipe.yaml:1: model.model_name_or_path: missing; expected text",
        "recipe.yaml:2: train.output_dir: missing; expected text",
        "recipe.yaml: data.dataset: `dataset` is missing; give a JSON-lines file, or `format: random`",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  max_steps: 1.5", "train.max_steps: expected a whole number ≥ 1, got 1.5"),
        ("  learning_rate: .nan", "train.learning_rate: expected a number ≥ 0, got nan"),
        ("  learning_rate: .inf", "train.learning_rate: expected a number ≥ 0, got inf"),
        ("  adam_beta1: 1", "train.adam_beta1: expected a number ≥ 0 and < 1, got 1"),
        ("  compile: perhaps", "train.compile: expected auto or true or false, got 'perhaps'"),
        (
            "  gradient_checkpointing: 3",
            "train.gradient_checkpointing: expected true or false or one of full, selective, got 3",
        ),
        ("  seed: {a: 1}", "train.seed: expected a whole number ≥ 0 and < 4294967296, got a mapping"),
        ("  seed: !!int abc", "train.seed: expected a whole number ≥ 0 and < 4294967296, got 'abc'"),
        ("  seed:", "train.seed: expected a whole number ≥ 0 and < 4294967296, got nothing"),
    ],
)
def test_wrong_values(tmp_path: Path, line: str, message: str) -> None:
    assert problems(tmp_path, f"{GOOD}{line}\n") == [f"recipe.yaml:7: {message}"]


def test_text_that_looks_like_a_number(tmp_path: Path) -> None:
    text = GOOD.replace("runs/one", "2026")
    assert problems(tmp_path, text) == [
        "recipe.yaml:6: train.output_dir: expected text, got 2026; put it in quotes",
    ]


def test_checks_of_a_whole_section(tmp_path: Path) -> None:
    text = GOOD + "  warmup_ratio: 0.1\n  warmup_steps: 3\nexport:\n  max_shard_size: 5 apples\n"
    assert problems(tmp_path, text) == [
        "recipe.yaml:8: train.warmup_steps: give warmup_ratio or warmup_steps, not both",
        "recipe.yaml:10: export.max_shard_size: expected a size such as 500MB or 5GB, got '5 apples'",
    ]


def test_checks_over_several_sections(tmp_path: Path) -> None:
    text = GOOD + "engine:\n  offload_optimizer: host\n  schedule: immediate\n"
    [problem] = problems(tmp_path, text)
    assert problem.startswith("recipe.yaml:9: engine.schedule: immediate steps are taken before the gradient norm is")
    [problem] = problems(tmp_path, GOOD + "  eval_steps: 2\n")
    assert problem == (
        "recipe.yaml:7: train.eval_steps: nothing is held out to evaluate on; set data.val_size or "
        "remove train.eval_steps"
    )


CONFLICTS = (
    GOOD
    + """\
  warmup_ratio: 0.1
engine:
  offload_optimizer: host
  schedule: deferred
  streamed_share: 0.0
"""
)


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (
            ["engine.state_format=int8", "engine.streamed_share=0.4"],
            "engine.streamed_share: states in state_format int8",
        ),
        (["engine.schedule=immediate"], "engine.schedule: immediate steps are taken before the gradient norm is known"),
        (
            ["model.dtype=float32", "engine.state_format=split"],
            "engine.state_format: state_format split needs bfloat16 parameters, which are half of its masters, and "
            "model.dtype is float32; set model.dtype to bfloat16, or engine.state_format to fp32",
        ),
        (["train.warmup_steps=3"], "train.warmup_steps: give warmup_ratio or warmup_steps, not both"),
        (["engine.offload_optimizer=host", "data.val_size=1.5"], "data.val_size: expected a share below 1"),
        (["export.max_shard_size=x"], "export.max_shard_size: expected a size such as"),
    ],
)
def test_a_conflict_is_told_where_the_value_came_from(tmp_path: Path, overrides: list[str], place: str) -> None:
    load(tmp_path, CONFLICTS)
    [problem] = problems(tmp_path, CONFLICTS, *overrides)
    assert problem.startswith(f"command line: {place}")


def test_a_conflict_of_file_and_command_line_is_told_at_the_command_line(tmp_path: Path) -> None:
    immediate = CONFLICTS.replace("deferred", "immediate").replace("train:\n", "train:\n  max_grad_norm: 0\n")
    [problem] = problems(tmp_path, immediate, "train.max_grad_norm=1")
    assert problem.startswith("command line: train.max_grad_norm: immediate steps are taken before")
    [problem] = problems(tmp_path, CONFLICTS.replace("0.0", "0.5"), "engine.state_format=int8")
    assert problem.startswith("command line: engine.state_format: states in state_format int8 are not streamed, got")


def test_split_states_of_float32_parameters_are_told_with_their_line(tmp_path: Path) -> None:
    split = CONFLICTS + "  state_format: split\n"
    load(tmp_path, split)  # dtype auto: known when the run starts
    load(tmp_path, split, "model.dtype=bfloat16")
    [problem] = problems(tmp_path, split.replace("model:\n", "model:\n  dtype: float32\n"))
    number = split.splitlines().index("  state_format: split") + 2
    assert problem.startswith(f"recipe.yaml:{number}: engine.state_format: state_format split needs bfloat16")
    [problem] = problems(tmp_path, split, "model.dtype=float32")
    assert problem.startswith("command line: model.dtype: state_format split needs bfloat16 parameters")


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    recipe = load_recipe(path, ["train.output_dir=~/run", "data.dataset=[~/a.jsonl, b.jsonl]"])
    assert recipe.output_dir == tmp_path / "run"
    assert recipe.data.files == (f"{tmp_path}/a.jsonl", "b.jsonl")


def test_duplicate_keys(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD + "  seed: 1\n  seed: 2\ntrain:\n  seed: 3\n") == [
        "recipe.yaml:8: train.seed: given twice (first in line 7); remove one",
        "recipe.yaml:9: train: given twice (first in line 5); remove one",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "recipe.yaml: empty recipe; expected the sections model, data and train"),
        ("# nothing\n---\n", "recipe.yaml: empty recipe; expected the sections model, data and train"),
        ("- a\n- b\n", "recipe.yaml:1: expected sections such as `model:`, got a list"),
        ("train\n", "recipe.yaml:1: expected sections such as `model:`, got 'train'"),
        (b"model: \xff\n", "recipe.yaml: expected UTF-8 text, got byte 0xff"),
    ],
)
def test_not_a_recipe(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert problems(tmp_path, text) == [message]


def test_section_that_is_no_mapping(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD + "engine: fast\nexport: [1]\n") == [
        "recipe.yaml:7: engine: expected keys such as `zero_stage: ...`, got 'fast'",
        "recipe.yaml:8: export: expected keys such as `save: ...`, got a list",
    ]


@pytest.mark.parametrize(
    "text", ["model: [a\ntrain: }", "a: b: c", "\tmodel: 1", "model: *nowhere", "a: \x07", "[" * 3000]
)
def test_broken_yaml_names_the_place(tmp_path: Path, text: str) -> None:
    [problem] = problems(tmp_path, text)
    assert problem.startswith("recipe.yaml")
    assert "not valid YAML" in problem or "nested too deeply" in problem
    assert "\n" not in problem


def test_syntax_error_has_line_and_column(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, "model:\n  dtype: auto\n  init: [a, b}\n")
    assert problem.startswith("recipe.yaml:3:14: not valid YAML: ")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such file"):
        load_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match=r"expected a recipe \(YAML file\), got a folder"):
        load_recipe(tmp_path)


def test_nul_characters_are_refused(tmp_path: Path) -> None:
    text = GOOD.replace("runs/one", '"runs\\0one"')
    assert problems(tmp_path, text) == ["recipe.yaml:6: train.output_dir: expected text without NUL characters"]


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000])
def test_absurd_numbers(tmp_path: Path, number: str) -> None:
    # Python itself refuses to read or write decimal integers of more than 4300 digits
    [problem] = problems(tmp_path, f"{GOOD}  seed: {number}\n")
    assert problem.startswith("recipe.yaml:7: train.seed: expected a whole number ≥ 0") and len(problem) < 200


def test_a_message_stays_short_whatever_came(tmp_path: Path) -> None:
    nested = "1"
    for _ in range(6):
        nested = f"[{', '.join([nested] * 5)}]"
    [problem] = problems(tmp_path, f"{GOOD}  run_name: {nested}\n")
    assert problem.startswith("recipe.yaml:7: train.run_name: expected text, got [[[") and len(problem) < 200
    assert len(shown(["x" * 100] * 10)) == len(shown({"x" * 100, "y" * 100})) == 100


def test_every_key_has_words_for_its_type() -> None:
    for model in sections().values():
        for field in model.model_fields.values():
            assert expected(field)


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", "\u2029 c", "tab\t\x85end", "two\nlines\n"])
def test_line_ends_that_only_yaml_knows_are_kept(text: str, tmp_path: Path) -> None:
    values = {
        "model": {"model_name_or_path": "m"},
        "data": {"dataset": "d"},
        "train": {"output_dir": "o"},
        "eval": {"sample_prompt": text},
    }
    recipe = Recipe.model_validate(values)
    assert load(tmp_path, dump_recipe(recipe)) == recipe and recipe.eval.sample_prompt == text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["1e5", "010", "yes", "null", "2026-01-31", "- x", "a: b", "#", "~"]) | texts,
    prompt=texts,
    rate=st.floats(0, 1),
    ratio=st.floats(0, 1),
    freeze=st.lists(texts, max_size=3),
)
def test_dump_reads_back_equal(
    tmp_path: Path, name: str, prompt: str, rate: float, ratio: float, freeze: list[str]
) -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"model_name_or_path": name, "freeze": freeze},
            "data": {"dataset": [name, prompt]},
            "train": {"output_dir": name, "learning_rate": rate},
            "engine": {"ratio": ratio, "offload_optimizer": "host"},
            "eval": {"sample_prompt": prompt},
        }
    )
    assert load(tmp_path, dump_recipe(recipe)) == recipe


scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.dates()
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.integers(), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(list(sections())) | texts
keys = st.sampled_from([key for model in sections().values() for key in model.model_fields]) | texts
mappings = st.dictionaries(names, anything | st.dictionaries(keys, anything, max_size=5), max_size=5)


def loads_or_says_why(tmp_path: Path, text: str, *overrides: str) -> None:
    try:
        load(tmp_path, text, *overrides)
    except UserError as error:
        for problem in error.problems:
            assert "\n" not in problem and len(problem) < 1500, problem
            assert "pydantic" not in problem and "Input should" not in problem, problem


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(mapping=mappings)
def test_random_mappings_never_end_in_a_traceback(tmp_path: Path, mapping: Any) -> None:
    loads_or_says_why(tmp_path, yaml.safe_dump(mapping, allow_unicode=True))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=60) | st.text("{}[]:,-?!*&'\"%@ \na1<|>", max_size=40))
def test_random_text_never_ends_in_a_traceback(tmp_path: Path, text: str) -> None:
    loads_or_says_why(tmp_path, text.encode("utf-8", "replace").decode())
    loads_or_says_why(tmp_path, GOOD, text, f"train.seed={text}", f"model.freeze={text}", f"{text}=1")
