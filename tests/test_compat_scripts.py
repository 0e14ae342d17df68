"""Scripts with `import deepspeed`, run as they are: by the launcher, by `python -m heavylift.compat`, and on ranks."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import command_env, heavylift_command
from ranks.pool import _Pool

SCRIPTS = Path(__file__).parent / "ds_scripts"
Report = dict[str, Any]
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Run]:
    """Two processes for all of these tests, in which nothing of Hugging Face has been imported before `install()`."""
    pool = _Pool(2)
    yield lambda job, *args: pool.run(job, args, 240)
    pool.close()


def run_script(name: str, *arguments: str) -> None:
    """Runs a script of `ds_scripts` in this process, which is a rank of a pool, as its launcher would."""
    from heavylift.compat import install

    install()
    sys.argv = [name, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")


# ---- small images ----------------------------------------------------------------------------------------------------


def images_job(folder: Path, runs: list[tuple[str, ...]]) -> None:
    for index, arguments in enumerate(runs):
        run_script("small_images.py", "--deepspeed", "--report", str(folder / f"{index}.json"), *arguments)


def plain_losses(num_epochs: int) -> list[float]:
    """The same training on one process, in torch alone: Adam, warm-up, clipping, the order of a DistributedSampler."""
    from heavylift.compat import install

    install()
    script = runpy.run_path(str(SCRIPTS / "small_images.py"))
    data, criterion = script["Pictures"](96, seed=1), torch.nn.CrossEntropyLoss()
    torch.manual_seed(7)
    net = script["Net"]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)
    sampler = torch.utils.data.DistributedSampler(data, 1, 0, shuffle=True, seed=0)
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler):
            # DeepSpeed's logarithmic warm-up over 4 steps, which starts one step late
            lr = 0.003 * min(1.0, torch.log(torch.tensor(max(1.0, len(losses)))).item() / 1.3862943611198906)
            optimizer.param_groups[0]["lr"] = lr
            loss = criterion(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_small_images_train_as_in_torch(tmp_path: Path, two_ranks: Run) -> None:
    """Losses of two ranks against those of plain torch on one: 1e-5 in float32, 2e-2 in bfloat16."""
    runs = [("--stage", "0", "-e", "4"), ("--stage", "3"), ("--stage", "2", "--dtype", "bf16")]
    two_ranks(images_job, tmp_path, runs)
    reports: list[Report] = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(3)]
    expected = plain_losses(4)
    assert reports[0]["losses"] == pytest.approx(expected, abs=1e-5)
    assert reports[1]["losses"] == pytest.approx(expected[:6], abs=1e-5)
    assert reports[2]["losses"] == pytest.approx(expected[:6], abs=2e-2)
    assert expected[-1] < 0.7 < expected[0]
    assert reports[0]["accuracy"] > 0.7


def test_the_launcher_runs_an_unmodified_script(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [*heavylift_command(), "launch", "--as-deepspeed", "--num_gpus", "2"]
    command += [str(SCRIPTS / "small_images.py"), "--deepspeed", "--stage", "2", "--report", str(report)]
    env = command_env(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy on 64 pictures") == 1
    assert "] [INFO] [1,     4] loss:" in done.stderr
    assert len(json.loads(report.read_text())["losses"]) == 6


# ---- masked words ----------------------------------------------------------------------------------------------------


def words_job(folder: Path, runs: list[tuple[str, ...]]) -> None:
    for arguments in runs:
        run_script("masked_words.py", "--checkpoint_dir", str(folder), *arguments)


def test_masked_words_train_and_resume(tmp_path: Path, two_ranks: Run) -> None:
    """zero.Init, an optimizer of the script on the host, safe_get_*, checkpoints. Resumed: equal to the bit."""
    runs = [
        ("--report", "whole.json"),
        ("--report", "resumed.json", "--load_checkpoint_dir", str(tmp_path), "--checkpoint_every", "0"),
        ("--report", "stage2.json", "--stage", "2", "--checkpoint_every", "0"),
    ]
    two_ranks(words_job, tmp_path, runs)
    whole, resumed, stage2 = (json.loads((tmp_path / r[1]).read_text()) for r in runs)
    assert len(whole["losses"]) == 24 and whole["losses"][-1] < whole["losses"][0] - 0.3
    assert resumed["losses"] == whole["losses"][12:]
    assert stage2["losses"] == whole["losses"]
    for key in ("grad", "param", "exp_avg", "sum"):
        assert resumed[key] == whole[key], key
    assert whole["exp_avg"] == [64, 32]
    _check_weights_of(tmp_path)


def _check_weights_of(folder: Path) -> None:
    """The script's own model takes the checkpoint's float32 weights."""
    from heavylift.api.zero_to_fp32 import load_state_dict_from_zero_checkpoint
    from heavylift.compat import install

    install()
    script = runpy.run_path(str(SCRIPTS / "masked_words.py"))
    model = load_state_dict_from_zero_checkpoint(script["create_model"](), folder)
    batch = {key: value[None] for key, value in script["MaskedSentences"](4)[0].items()}
    assert float(model(**batch).loss) < 2.95  # chance: 2.94 for 19 words, about 3.0 before training
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


# ---- python -m heavylift.compat --------------------------------------------------------------------------------------


def as_deepspeed(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heavylift.compat", *arguments]
    return subprocess.run(command, env=command_env(), cwd=cwd, capture_output=True, text=True, timeout=300)


def test_a_script_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    script = "import sys, deepspeed, beside\nif __name__ == '__main__':\n"
    (tmp_path / "script.py").write_text(script + "    print(sys.argv[1:], beside.WORD, deepspeed.__version__)\n")
    done = as_deepspeed("script.py", "--x", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "['--x', '1'] beside 0.19.6+heavylift"
    module = as_deepspeed("-m", "deepspeed.utils.zero_to_fp32", "nowhere", "out", cwd=tmp_path)
    assert module.returncode == 2
    assert module.stderr.splitlines()[-1].startswith("error: nowhere: no file `latest` here")


def test_bad_commands_are_one_line(tmp_path: Path) -> None:
    missing = as_deepspeed("absent.py", cwd=tmp_path)
    assert (missing.returncode, missing.stderr) == (
        2,
        "error: absent.py: no such file; give the path of a script, or -m and a module\n",
    )
    assert as_deepspeed(cwd=tmp_path).returncode == 2
    (tmp_path / "wrong.py").write_text(
        "import deepspeed, torch\ndeepspeed.initialize(model=torch.nn.Linear(2, 2), config={'zero_optimisation': {}})\n"
    )
    wrong = as_deepspeed("wrong.py", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr and "zero_optimization" in wrong.stderr
