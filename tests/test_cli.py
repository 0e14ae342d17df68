"""The command itself: what it imports, its exit codes, and answers of a real (tiny) model."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished, command_env, heavylift_command
from typer.testing import CliRunner

from heavylift.cli.main import app

Run = Callable[..., Finished]


@pytest.mark.parametrize("module", ["heavylift.cli.main", "heavylift.cli.train", "heavylift.train.preflight"])
def test_no_heavy_imports(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'numpy', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=command_env(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_preflight_of_a_good_recipe_imports_nothing_heavy(write_recipe: Callable[..., Path]) -> None:
    code = (
        "import sys; from heavylift.config.recipe import load_recipe; from heavylift.train.preflight import check;"
        f"print(check(load_recipe({str(write_recipe())!r}), 1), sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=command_env(), capture_output=True, text=True)
    assert done.stdout == "8 []\n", done.stderr


def test_version_and_help(run_heavylift: Run) -> None:
    version = run_heavylift("--version")
    assert version.rc == 0 and version.stdout.startswith("heavylift ")
    usage = run_heavylift("train", "--help")
    assert usage.rc == 0
    assert all(word in usage.stdout for word in ("RECIPE.yaml", "SECTION.KEY=VALUE", "--nproc", "--debug"))


def test_the_package_is_the_command_too(tmp_path: Path) -> None:
    """For torchrun, and where the command is not on the path."""
    argv = [sys.executable, "-m", "heavylift", "train", "nothere.yaml"]
    done = subprocess.run(argv, cwd=tmp_path, env=command_env(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nothere.yaml: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [["trian"], ["train"], ["train", "a.yaml", "--nproc", "0"], ["generate", "x"], ["train", "a.yaml", "--nproq=1"]],
)
def test_wrong_usage(run_heavylift: Run, args: list[str]) -> None:
    ended = run_heavylift(*args)
    assert ended.rc == 2 and "Traceback" not in ended.stderr and "Usage:" in ended.stderr


def test_generate_is_the_models_greedy_answer(run_heavylift: Run, tiny_llama_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ended = run_heavylift("generate", tiny_llama_dir, "Boil an egg?", "--max-new-tokens", "9")
    assert ended.rc == 0, ended.stderr
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    text = "<|im_start|>user\nBoil an egg?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer: list[int] = []
    with torch.no_grad():
        for _ in range(9):
            answer.append(
                int(model(torch.cat([ids, torch.tensor([answer], dtype=torch.int64)], 1)).logits[0, -1].argmax())
            )
            if answer[-1] == tokenizer.eos_token_id:
                break
    assert ended.stdout.strip() == tokenizer.decode(answer, skip_special_tokens=True).strip()
    assert ended.stderr == ""


def generate(*args: str | Path) -> Finished:
    """The command in this process, where torch is loaded."""
    done = CliRunner().invoke(app, ["generate", *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Finished(done.exit_code, done.stdout, done.stderr)


def test_generate_with_another_template_and_tokenizer_folder(
    tiny_llama_copy: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "plain.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tiny_llama_copy / name).unlink()
    args = [tiny_llama_copy, "Tide?", "--max-new-tokens", "5", "--tokenizer", tiny_llama_dir]
    own = generate(*args)
    other = generate(*args, "--chat-template", tmp_path / "plain.jinja")
    assert own.rc == other.rc == 0, own.stderr + other.stderr
    assert own.stdout != other.stdout


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no *.safetensors"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_generate_with_a_damaged_folder(run_heavylift: Run, tiny_llama_copy: Path, damage: str, said: str) -> None:
    (tiny_llama_copy / damage).unlink()
    ended = run_heavylift("generate", tiny_llama_copy, "Tide?")
    assert ended.rc == 2 and len(ended.errors) == 1 and said in ended.errors[0]
    assert "Traceback" not in ended.stderr


def test_generate_refuses_random_weights(tiny_llama_copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = tiny_llama_copy / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    ended = generate(tiny_llama_copy, "Tide?")
    assert ended.rc == 2 and "model.layers.1.mlp.up_proj.weight" in ended.errors[-1]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (b"{{ bad", "the chat template fails on PROMPT: TemplateSyntaxError: unexpected end of template"),
        (
            b"{{ raise_exception('no users') }}",
            "the chat template fails on PROMPT: TemplateError: no users; give",
        ),
        (b"{{ \xff }}", "template: cannot be read: it is not UTF-8 text; change --chat-template"),
    ],
)
def test_generate_with_a_broken_template(tiny_llama_dir: Path, tmp_path: Path, template: bytes, said: str) -> None:
    (tmp_path / "template").write_bytes(template)
    ended = generate(tiny_llama_dir, "Tide?", "--chat-template", tmp_path / "template")
    assert ended.rc == 2 and len(ended.errors) == 1 and said in ended.errors[0]


def test_a_prompt_of_bytes_that_are_no_text(tiny_llama_dir: Path) -> None:
    ended = generate(tiny_llama_dir, "\udcff")
    assert (ended.rc, ended.errors) == (2, ["PROMPT: expected UTF-8 text, got bytes that are not"])


def test_generate_of_nothing(run_heavylift: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    assert run_heavylift("generate", tiny_llama_dir, " ").errors == ["PROMPT: expected a question, got an empty text"]
    assert run_heavylift("generate", tmp_path / "none", "Tide?").rc == 2


def test_interrupted(tiny_llama_dir: Path) -> None:
    command = [*heavylift_command(), "generate", str(tiny_llama_dir), "Tide?", "--max-new-tokens", "1000000"]
    process = subprocess.Popen(command, env=command_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps = Path(f"/proc/{process.pid}/maps")
    try:
        while process.poll() is None and "libtorch_cpu" not in maps.read_text():
            time.sleep(0.01)  # until it is in the middle of its imports
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr


def test_a_working_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    line = ["bash", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "bash", *heavylift_command()]
    done = subprocess.run([*line, "train", "x.yaml"], env=command_env(), cwd=tmp_path, capture_output=True, text=True)
    said = "error: the working folder cannot be used: No such file or directory; change into one that is there\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
