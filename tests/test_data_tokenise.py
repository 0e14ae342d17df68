"""From files to samples: limits, what is dropped, the cache (also with several processes), the split, the report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import CHATML, decode_trained, make_recipe, make_tokenizer, row, write_rows

from heavylift.data import tokenise
from heavylift.data.report import DataReport, report_lines
from heavylift.data.samples import SampleSet, permutation
from heavylift.data.tokenise import load_samples
from heavylift.errors import UserError

ROWS = [row("q1", "one"), row("q2", "two, and " * 20), row("q3", "three"), row("日本", "🙂")]


@pytest.fixture
def data(tmp_path) -> Path:
    return write_rows(tmp_path / "data.jsonl", ROWS)


def load(tmp_path, dataset, model_max_len=1000, vocab_size=420, tokenizer=None, **options) -> SampleSet:
    recipe = make_recipe(dataset, **options)
    return load_samples(recipe, lambda: tokenizer or make_tokenizer(), tmp_path / "cache", model_max_len, vocab_size)


def equal(a: SampleSet, b: SampleSet) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "trained", "offsets"))


def test_samples_are_what_render_says(tmp_path, data):
    samples = load(tmp_path, data)
    assert len(samples) == 4
    tokenizer = make_tokenizer()
    for i, expected in enumerate(["one", "two, and " * 20, "three", "🙂"]):
        ids, trained = samples.sample(i)
        assert decode_trained(tokenizer, ids.tolist(), trained.tolist()) == expected + "<|im_end|>"
        assert samples.length(i) == len(ids) and samples.num_trained_tokens(i) == trained.sum()
    report = samples.report
    assert (report.num_rows, report.num_samples, report.num_dropped, report.num_cut) == (4, 4, 0, 0)
    assert report.num_tokens == len(samples.tokens) and report.num_trained_tokens == samples.trained.sum()
    assert report.longest == samples.length(1) and report.notes == ()


def test_overlong_error_names_every_line_and_the_keys(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [ROWS[1], ROWS[0], ROWS[1]])
    with pytest.raises(UserError) as info:
        load(tmp_path, path, cutoff_len=60)
    assert [p.split(": ")[0] for p in info.value.problems] == [f"{path}:1", f"{path}:3"]
    assert all("60" in p and "data.cutoff_len" in p and "data.overlong" in p for p in info.value.problems)
    assert not list((tmp_path / "cache").glob("*.safetensors"))


def test_overlong_drop(tmp_path, data):
    samples = load(tmp_path, data, cutoff_len=60, overlong="drop")
    assert len(samples) == 3 and samples.lengths.max() <= 60
    ((source, reason),) = samples.report.dropped
    assert source == f"{data}:2" and "more than 60" in reason


def test_overlong_truncate(tmp_path, data):
    whole, cut = load(tmp_path, data), load(tmp_path, data, cutoff_len=60, overlong="truncate")
    assert len(cut) == 4 and cut.report.num_cut == 1 and cut.length(1) == 60
    assert np.array_equal(cut.sample(1)[0], whole.sample(1)[0][:60])
    assert np.array_equal(cut.sample(0)[0], whole.sample(0)[0])


def test_truncate_that_leaves_nothing_trained_drops_and_says_so(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [row("long question " * 20, "a"), row("q", "a")])
    samples = load(tmp_path, path, cutoff_len=50, overlong="truncate")
    assert len(samples) == 1 and samples.report.num_cut == 0
    ((source, reason),) = samples.report.dropped
    assert source == f"{path}:1" and "no trained token in the first 50 of" in reason
    with pytest.raises(UserError, match=r"none of the 2 rows leaves a token to train on .*data.cutoff_len"):
        load(tmp_path, path, cutoff_len=2, overlong="truncate")


def test_the_smaller_limit_counts(tmp_path, data):
    with pytest.raises(UserError, match="more than the 60 allowed"):
        load(tmp_path, data, model_max_len=60)
    samples = load(tmp_path, data, model_max_len=60, cutoff_len=5000, overlong="drop")
    assert samples.report.cutoff_len == 60 and "the model takes 60 tokens" in samples.report.notes[0]


def test_no_limit_at_all(tmp_path, data):
    assert load(tmp_path, data, model_max_len=None, vocab_size=None).report.cutoff_len is None


def test_vocabulary_larger_than_the_embedding(tmp_path, data):
    largest = int(load(tmp_path, data).tokens.max())
    load(tmp_path, data, vocab_size=largest + 1)
    with pytest.raises(UserError, match=rf"token id {largest}, .* only {largest} rows; .*tokenizer_name_or_path"):
        load(tmp_path, data, vocab_size=largest)


def test_num_samples_takes_the_first(tmp_path, data):
    few, all_ = load(tmp_path, data, num_samples=2), load(tmp_path, data)
    assert len(few) == 2 and equal(few, all_.subset(np.arange(2))) and few.report.num_rows == 2


def test_problems_of_all_rows_are_collected_and_stop(tmp_path):
    template = tmp_path / "no.jinja"
    template.write_text("{{ raise_exception('never') }}")
    path = write_rows(tmp_path / "d.jsonl", ROWS)
    with pytest.raises(UserError) as info:
        load(tmp_path, path, chat_template=str(template))
    assert [p.split(": ")[0] for p in info.value.problems] == [f"{path}:{i}" for i in (1, 2, 3, 4)]
    path = write_rows(tmp_path / "e.jsonl", ROWS * 10)
    with pytest.raises(UserError) as info:
        load(tmp_path, path, chat_template=str(template))
    assert len(info.value.problems) == 21 and "stopped after 20" in info.value.problems[-1]


def test_chat_template_from_a_file(tmp_path, data):
    template = tmp_path / "t.jinja"
    template.write_text(CHATML.replace("You are kind.", "Hm."))
    tokenizer = make_tokenizer(None)
    samples = load(tmp_path, data, tokenizer=tokenizer, chat_template=str(template))
    assert "Hm." in tokenizer.decode(samples.sample(0)[0])
    with pytest.raises(UserError, match="data.chat_template"):
        load(tmp_path, data, tokenizer=tokenizer)


def test_missing_data_file(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path, tmp_path / "none.jsonl")


def test_note_when_nothing_teaches_the_model_to_stop(tmp_path, data):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert "will not learn to stop" in load(tmp_path, data, chat_template=str(template)).report.notes[0]


def test_random_tokens():
    def never():
        raise AssertionError("no tokenizer needed")

    def load_random(seed, vocab_size=97, model_max_len=64):
        recipe = make_recipe(seed=seed, format="random", num_samples=20, cutoff_len=32)
        return load_samples(recipe, never, Path("/nonexistent"), model_max_len, vocab_size)

    samples = load_random(1)
    assert len(samples) == 20 and set(samples.lengths) == {32} and set(samples.trained_lengths) == {31}
    assert samples.tokens.min() >= 0 and samples.tokens.max() < 97 and len(set(samples.tokens.tolist())) > 80
    assert equal(samples, load_random(1)) and not equal(samples, load_random(2))
    with pytest.raises(UserError, match=r"data.cutoff_len: 32 tokens, the model takes 31"):
        load_random(1, model_max_len=31)


# --- cache


def test_cache_hit_does_not_tokenise_and_is_equal(tmp_path, data, monkeypatch):
    first = load(tmp_path, data)
    monkeypatch.setattr(tokenise, "_tokenise", lambda *_: pytest.fail("tokenised again"))
    second = load(tmp_path, data)
    assert equal(first, second) and second.report == first.report
    assert [f.suffix for f in sorted((tmp_path / "cache").iterdir())] == [".lock", ".safetensors"]


@pytest.mark.parametrize("change", ["data", "cutoff", "inputs", "template", "tokenizer", "num"])
def test_cache_key_sees_every_change(tmp_path, data, change):
    load(tmp_path, data)
    tokenizer, options = make_tokenizer(), {}
    if change == "data":
        data.write_bytes(data.read_bytes() + json.dumps(row("q5", "five")).encode())
    elif change == "template":
        tokenizer = make_tokenizer(CHATML + " ")
    elif change == "tokenizer":
        tokenizer.add_tokens(["three"])
    else:
        options = {"cutoff": {"cutoff_len": 999}, "inputs": {"train_on_inputs": True}, "num": {"num_samples": 4}}[
            change
        ]
    load(tmp_path, data, tokenizer=tokenizer, **options)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2


def test_broken_cache_file_is_replaced(tmp_path, data):
    first = load(tmp_path, data)
    (file,) = (tmp_path / "cache").glob("*.safetensors")
    whole = file.read_bytes()
    for broken in (b"", whole[:100], whole[:-8]):
        file.write_bytes(broken)
        assert equal(load(tmp_path, data), first)
        assert file.read_bytes() == whole


def test_cache_folder_that_cannot_be_made(tmp_path, data):
    (tmp_path / "cache").write_text("a file in the way")
    samples = load(tmp_path, data)
    assert len(samples) == 4 and "not cached" in samples.report.notes[-1]


WORKER = """
import os, sys, time
from pathlib import Path
from data_helpers import make_recipe, make_tokenizer
from heavylift.data import tokenise

folder, real = Path(sys.argv[1]), tokenise._tokenise

def slow(*args):
    with open(folder / "log", "a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(1.5)
    return real(*args)

tokenise._tokenise = slow
(folder / f"ready{os.getpid()}").touch()
while len(list(folder.glob("ready*"))) < 2:  # both are past their imports
    time.sleep(0.01)
samples = tokenise.load_samples(make_recipe(folder / "data.jsonl"), make_tokenizer, folder / "cache", 1000, 420)
print(len(samples), int(samples.tokens.sum()), int(samples.trained.sum()))
"""


def test_two_processes_tokenise_once(tmp_path, data):
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # as in this process, installed or not
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) for _ in range(2)
    ]
    results = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], results
    assert results[0][0] == results[1][0] != ""
    assert len((tmp_path / "log").read_text().split()) == 1
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1


# --- split


def numbered(num: int) -> SampleSet:
    """Sample i has i % 5 + 2 tokens and begins with token i."""
    lists = [([i] + [1] * (i % 5 + 1), [False] + [True] * (i % 5 + 1)) for i in range(num)]
    return SampleSet.from_lists(lists, DataReport(("numbered",), num, num))


def firsts(samples: SampleSet) -> list[int]:
    return [int(samples.sample(i)[0][0]) for i in range(len(samples))]


@pytest.mark.parametrize(("val_size", "num_val"), [(0.1, 10), (0.001, 1), (7, 7), (1, 1), (99, 99), (0, 0)])
def test_split_is_a_disjoint_cover(val_size, num_val):
    train, val = numbered(100).split(val_size, seed=3)
    assert len(val) == num_val and sorted(firsts(train) + firsts(val)) == list(range(100))
    assert firsts(val) == sorted(firsts(val))
    for part in (train, val):
        for i, first in enumerate(firsts(part)):
            assert part.length(i) == first % 5 + 2 and part.num_trained_tokens(i) == first % 5 + 1


def test_split_depends_on_the_seed_only():
    a, b, c = (firsts(numbered(100).split(10, seed)[1]) for seed in (1, 1, 2))
    assert a == b != c


@pytest.mark.parametrize("val_size", [4, 400, 0.9])
def test_split_that_leaves_nothing(val_size):
    with pytest.raises(UserError, match=r"data.val_size: .* of 4 samples, nothing is left"):
        numbered(4).split(val_size, seed=1)


def test_permutation_is_frozen():
    # raw bits of PCG64 are stable by NumPy's policy; a change here would change the order of everybody's runs
    assert permutation(8, 42, 2, 0).tolist() == [2, 6, 0, 3, 4, 7, 5, 1]
    assert sorted(permutation(1000, -5).tolist()) == list(range(1000))


# --- report


def test_report_survives_json(tmp_path, data):
    report = load(tmp_path, data, cutoff_len=60, overlong="drop").report
    assert report.dropped and report.sample and DataReport.from_json(report.to_json()) == report


def test_report_lines(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [row("[bold]q[/bold]\nmore", "ans[red]wer\nsecond"), ROWS[1]])
    from rich.text import Text

    samples = load(tmp_path, path, cutoff_len=70, overlong="drop")
    plain = [Text.from_markup(line).plain for line in report_lines(samples.report)]
    shown = "\n".join(plain)
    assert "1 of 2 rows used, 1 dropped" in shown
    assert f"{path}:2: " in shown and "answers only" in shown
    assert f"{len(samples.tokens)} tokens, {samples.trained.sum()} trained" in shown
    assert "| [bold]q[/bold]" in shown
    assert plain[-3:] == ["  | »ans[red]wer", "  | second<|im_end|>«", "  | "]


def test_report_of_inputs_and_of_random_tokens(tmp_path, data):
    assert "prompts and answers" in "\n".join(report_lines(load(tmp_path, data, train_on_inputs=True).report))
    recipe = make_recipe(format="random", num_samples=2, cutoff_len=8)
    lines = report_lines(load_samples(recipe, make_tokenizer, tmp_path, None, 50).report)
    assert "random tokens (seed 42)" in lines[0] and "a sample" not in "\n".join(lines)
