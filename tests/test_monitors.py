"""What is written to a monitor can be read back with that monitor's own program."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from wandb_files import wandb_exit_code, wandb_history

from heavylift.config.deepspeed.settings import MonitorSettings
from heavylift.errors import UserError
from heavylift.monitor.comet_sink import SampleThrottle
from heavylift.monitor.events import elapsed_events, step_events
from heavylift.monitor.master import SINKS, MonitorMaster

EVENTS = [
    ("Train/Samples/lr", 0.25, 8),
    ("Train/Samples/train_loss", 1.5, 8),
    ("Train/Samples/lr", 0.125, 16),
]


def file_monitor(kind: str, folder: Path, job_name: str = "job") -> MonitorSettings:
    return MonitorSettings(kind, {"output_path": str(folder), "job_name": job_name})


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_csv_has_one_file_per_event_name(tmp_path: Path) -> None:
    monitor = MonitorMaster([file_monitor("csv", tmp_path)], enabled=True)
    monitor.write_events(EVENTS)
    # readable while the run goes on
    assert rows(tmp_path / "job" / "Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.25"], ["16", "0.125"]]
    assert rows(tmp_path / "job" / "Train_Samples_train_loss.csv") == [["step", "train_loss"], ["8", "1.5"]]
    monitor.close()
    assert not monitor.enabled
    monitor.write_events(EVENTS)
    assert len(rows(tmp_path / "job" / "Train_Samples_lr.csv")) == 3


def test_a_resumed_run_adds_rows_without_a_second_header(tmp_path: Path) -> None:
    for step in (1, 2):
        monitor = MonitorMaster([file_monitor("csv", tmp_path)], enabled=True)
        monitor.write_events([("my loss", float("nan"), step)])
        monitor.close()
    assert rows(tmp_path / "job" / "my_loss.csv") == [["step", "my loss"], ["1", "nan"], ["2", "nan"]]


@pytest.mark.parametrize("nowhere", ["", None])
def test_without_a_path_the_job_stands_in_the_working_folder(
    nowhere: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = MonitorMaster([MonitorSettings("csv", {"output_path": nowhere})], enabled=True)
    monitor.write_events([("lr", 0.5, 1)])
    assert (tmp_path / "DeepSpeedJobName" / "lr.csv").read_text().split() == ["step,lr", "1,0.5"]
    monkeypatch.setenv("HOME", str(tmp_path))
    MonitorMaster([MonitorSettings("csv", {"output_path": "~/curves", "job_name": "j"})], enabled=True)
    assert (tmp_path / "curves" / "j").is_dir()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    monitor = MonitorMaster([file_monitor("tensorboard", tmp_path), file_monitor("csv", tmp_path, "csv")], enabled=True)
    monitor.write_events([*EVENTS, ("Train/Samples/train_loss", torch.tensor([0.5]), 16)])  # type: ignore[list-item]
    assert scalars(tmp_path / "job", "Train/Samples/lr") == [(8, 0.25), (16, 0.125)]
    monitor.flush()
    monitor.close()
    assert scalars(tmp_path / "job", "Train/Samples/train_loss") == [(8, 1.5), (16, 0.5)]
    assert rows(tmp_path / "csv" / "Train_Samples_train_loss.csv")[1:] == [["8", "1.5"], ["16", "0.5"]]


def test_wandb_offline_has_a_row_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"project": "p", "group": "g", "team": "t", "name": "n", "folder": tmp_path, "config": {"lr": 1e-3}}
    monitor = MonitorMaster([MonitorSettings("wandb", options)], enabled=True)
    assert (wandb.run.project, wandb.run.group, wandb.run.entity, wandb.run.name) == ("p", "g", "t", "n")
    assert wandb.run.config["lr"] == 1e-3
    monitor.write_events(EVENTS)
    monitor.close()
    assert wandb.run is None
    assert wandb_exit_code(tmp_path) == 0
    history = wandb_history(tmp_path)
    names = ("_step", "Train/Samples/lr", "Train/Samples/train_loss")
    assert [[row.get(name) for name in names] for row in history] == [[8, 0.25, 1.5], [16, 0.125, None]]


def test_a_run_that_raises_is_shown_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = [MonitorSettings("wandb", {"folder": tmp_path}), file_monitor("csv", tmp_path)]
    with pytest.raises(ZeroDivisionError), MonitorMaster(settings, enabled=True) as monitor:
        monitor.write_events(EVENTS)
        raise ZeroDivisionError
    assert not monitor.enabled
    assert [row["_step"] for row in wandb_history(tmp_path)] == [8, 16]
    assert wandb_exit_code(tmp_path) == 1


def test_wandb_run_of_the_script_is_used_and_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    own = wandb.init(mode="offline", project="mine", dir=tmp_path)
    monitor = MonitorMaster([MonitorSettings("wandb", {})], enabled=True)
    monitor.write_events(EVENTS)
    monitor.close()
    assert wandb.run is own
    own.finish()
    assert [row["_step"] for row in wandb_history(tmp_path)] == [8, 16]


_COMET = """
import sys
from heavylift.config.deepspeed.settings import MonitorSettings
from heavylift.monitor.master import SINKS, MonitorMaster

options = {"online": False, "project": "p", "experiment_name": "n", "samples_log_interval": 16}
monitor = MonitorMaster([MonitorSettings("comet", options)], enabled=True)
for x in (8, 16, 24, 32, 48):
    monitor.write_events([("Train/Samples/lr", x / 64, x)])
monitor.close()
"""


def test_comet_offline_archive_has_every_16th_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("comet_ml") is None:
        pytest.skip("could not import 'comet_ml'")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    for costly in ("AUTO_LOG_ENV_DETAILS", "AUTO_LOG_GIT_PATCH", "AUTO_LOG_CODE"):
        monkeypatch.setenv(f"COMET_{costly}", "false")
    # in a process of its own: the package patches others when it is imported
    subprocess.run([sys.executable, "-c", _COMET], check=True, capture_output=True, cwd=tmp_path)
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        messages = [json.loads(line) for line in opened.read("messages.json").decode().splitlines()]
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    # there are others, of Comet itself
    found = [(one["metricValue"], one["step"]) for one in metrics if one["metricName"] == "Train/Samples/lr"]
    assert found == [(x / 64, x) for x in (8, 24, 48)]


def test_throttle_counts_each_name_by_itself() -> None:
    throttle = SampleThrottle(10)
    assert [throttle.lets_through("a", x) for x in (3, 12, 13, 22, 23)] == [True, False, True, False, True]
    assert throttle.lets_through("b", 22)


def test_other_ranks_open_nothing(tmp_path: Path) -> None:
    monitor = MonitorMaster([file_monitor("csv", tmp_path)], enabled=False)
    assert not monitor.enabled
    monitor.write_events(EVENTS)
    monitor.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_a_missing_package_is_named(kind: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    # as on a machine without it: neither found nor imported, whatever this process has loaded already
    real = importlib.util.find_spec
    monkeypatch.setattr("heavylift.config.packages.find_spec", lambda name: None if name == package else real(name))
    for loaded in [name for name in sys.modules if name.split(".")[0] == package or name == "torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        MonitorMaster([file_monitor("csv", tmp_path), MonitorSettings(kind, {})], enabled=True)
    assert list(tmp_path.iterdir()) == [], "nothing was written for the others"
    assert caught.value.problems == (
        f"monitor {kind}: needs the package {package}, which is not installed; pip install {package}, "
        f"or switch {kind} off",
    )


def test_all_bad_settings_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad = [
        MonitorSettings("csv", {"output_dir": "x"}),
        MonitorSettings("mlflow", {}),
        file_monitor("csv", tmp_path),
    ]
    with pytest.raises(UserError) as caught:
        MonitorMaster(bad, enabled=True)
    first, second = caught.value.problems
    assert first == "monitor csv: output_dir: not an option; did you mean output_path?"
    assert second == "monitor mlflow: expected one of tensorboard, csv, wandb, comet"
    assert not (tmp_path / "job").exists(), "the good one was not opened"
    with pytest.raises(UserError, match="cannot be made: Not a directory; change output_path or job_name"):
        MonitorMaster([file_monitor("csv", tmp_path / "file")], enabled=True)


def test_a_sink_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    monitor = MonitorMaster([file_monitor("csv", tmp_path), file_monitor("tensorboard", tmp_path, "tb")], enabled=True)
    # a folder stands where the file of this event would be
    (tmp_path / "job" / "Train_Samples_lr.csv").mkdir()
    monitor.write_events(EVENTS)
    monitor.write_events([("Train/Samples/lr", 2.0, 24)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("monitor csv: stopped, training goes on without it: [Errno 21] Is a directory")
    assert monitor.enabled
    assert scalars(tmp_path / "tb", "Train/Samples/lr") == [(8, 0.25), (16, 0.125), (24, 2.0)]


def test_every_option_of_a_ds_config_has_its_sink(tmp_path: Path) -> None:
    from heavylift.config.deepspeed.parse import load_settings

    blocks: dict[str, Any] = {
        "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "tb"},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path)},
        "wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"},
        "comet": {"enabled": True, "samples_log_interval": 5, "online": False},
    }
    settings = load_settings({"train_batch_size": 8, **blocks}, world_size=1)
    assert [monitor.kind for monitor in settings.monitors] == list(SINKS)
    for monitor in settings.monitors:
        # the names, without starting the programs
        signature(SINKS[monitor.kind]).bind(**monitor.options)
    (csv_monitor,) = [monitor for monitor in settings.monitors if monitor.kind == "csv"]
    MonitorMaster([csv_monitor], enabled=True).write_events(EVENTS)
    assert len(rows(tmp_path / "DeepSpeedJobName" / "Train_Samples_lr.csv")) == 3


def test_names_of_events() -> None:
    assert step_events(32, 0.1) == [("Train/Samples/lr", 0.1, 32)]
    assert step_events(32, 0.1, loss=2.0, loss_scale=1024.0) == [
        ("Train/Samples/lr", 0.1, 32),
        ("Train/Samples/train_loss", 2.0, 32),
        ("Train/Samples/loss_scale", 1024.0, 32),
    ]
    assert elapsed_events(4, {"forward": 1.5, "backward_inner": 2.5}) == [
        ("Train/Samples/elapsed_time_ms_forward", 1.5, 4),
        ("Train/Samples/elapsed_time_ms_backward_inner", 2.5, 4),
    ]
