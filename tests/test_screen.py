"""Output that cannot be written does not end our programs: no reader, a full disk, a closed descriptor, ASCII."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import command_env, heavylift_command

SHOUT = """
import sys
from heavylift.launch.screen import keep_running_without_screen
keep_running_without_screen()
for stream in (sys.stdout, sys.stderr):
    print("»" * 100_000, file=stream, flush=True)
open(sys.argv[1], "w").write(sys.stdout.encoding)
"""


@pytest.mark.parametrize("how", [">/dev/full 2>/dev/full", ">&- 2>&- <&-", "2>&1 | true", ">/dev/null 2>&1"])
def test_what_cannot_be_written_is_left_out(how: str, tmp_path: Path) -> None:
    line = ["bash", "-c", f'set -o pipefail; "$@" {how}', "bash", sys.executable, "-c", SHOUT, tmp_path / "file"]
    done = subprocess.run(line, env=command_env(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # a file that is opened does not take the place of a closed stdout
    assert (tmp_path / "file").read_text() == "utf-8"


def test_characters_that_the_locale_has_not(tmp_path: Path) -> None:
    line = [sys.executable, "-c", SHOUT, tmp_path / "file"]
    done = subprocess.run(line, env=command_env(PYTHONIOENCODING="ascii"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, done.stdout) and done.stdout == r"\xbb" * 100_000 + "\n"


def test_a_run_trains_to_its_end_without_screen(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    line = ["bash", "-c", '"$@" >&- 2>/dev/full', "bash", *heavylift_command(), "train", write_recipe()]
    assert subprocess.run(line, env=command_env()).returncode == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run" / "model" / "config.json").is_file()
