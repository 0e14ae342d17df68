"""Metrics: records, the file, the step line, the loss picture, progress and the two summaries."""

from __future__ import annotations

import io
import json
import math
import re
import resource
import signal
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heavylift.config.schema import Schedule, Tier
from heavylift.errors import UserError
from heavylift.memory.plan import MemoryPlan
from heavylift.train.metrics import (
    EvalMetrics,
    MetricsWriter,
    RunMetrics,
    StepMetrics,
    eval_line,
    memory_now,
    read_metrics,
    step_line,
)
from heavylift.train.plot import plot_loss, smoothed
from heavylift.train.progress import Progress, RunSummary, banner, end_summary, format_duration

NAN = math.nan
STEP = StepMetrics(
    step=20,
    loss=2.89959,
    grad_norm=0.9573,
    lr=1e-5,
    step_s=1.5,
    tokens=11062,
    tokens_per_s=7374.7,
    tflops=0.53,
    model_tflops=0.41,
    mem_device_gib=9.46,
    mem_host_gib=12.1,
    collective_wait_s=0.25,
)


def write(path: Path, *records: StepMetrics | EvalMetrics) -> Path:
    with MetricsWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path


def strict(line: str) -> dict[str, Any]:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(line, parse_constant=refuse)


class TestFile:
    def test_step_record_has_exactly_the_promised_keys(self, tmp_path: Path) -> None:
        line = write(tmp_path / "m.jsonl", STEP).read_text()
        assert " ".join(strict(line)) == (
            "step loss grad_norm lr step_s tokens tokens_per_s tflops model_tflops mem_device_gib mem_host_gib"
            " collective_wait_s"
        )

    def test_eval_record_is_a_line_of_its_own(self, tmp_path: Path) -> None:
        lines = write(tmp_path / "m.jsonl", EvalMetrics(0, 3.5), STEP).read_text().splitlines()
        assert strict(lines[0]) == {"step": 0, "eval_loss": 3.5}
        assert len(lines) == 2

    @pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
    def test_values_that_are_not_finite_become_null(self, tmp_path: Path, value: float) -> None:
        path = write(tmp_path / "m.jsonl", replace(STEP, loss=value, grad_norm=value))
        values = strict(path.read_text())
        assert values["loss"] is None and values["grad_norm"] is None and values["lr"] == 1e-5
        back = read_metrics(path).steps[0]
        assert math.isnan(back.loss) and back.skipped

    def test_reads_back_what_was_written(self, tmp_path: Path) -> None:
        first, second = EvalMetrics(0, 3.5), EvalMetrics(21, 2.5)
        path = write(tmp_path / "m.jsonl", first, STEP, replace(STEP, step=21, loss=1 / 3), second)
        expected = RunMetrics((STEP, replace(STEP, step=21, loss=1 / 3)), (first, second))
        assert read_metrics(path) == expected

    def test_each_line_is_on_disk_at_once_and_a_second_writer_appends(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        writer = MetricsWriter(path)
        writer.write(STEP)
        assert len(read_metrics(path).steps) == 1
        writer.close()
        write(path, STEP)
        assert len(read_metrics(path).steps) == 2

    def test_half_a_last_line_of_a_killed_run_is_left_out(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.jsonl", STEP, STEP)
        path.write_text(path.read_text()[:-20])
        assert read_metrics(path).steps == (STEP,)

    @pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', '{"step": 1, "eval_loss": "low"}', ""])
    def test_foreign_line_is_named(self, tmp_path: Path, line: str) -> None:
        path = write(tmp_path / "m.jsonl", STEP)
        path.write_text(path.read_text() + line + "\n")
        with pytest.raises(UserError, match=r"m\.jsonl:2: expected a step or evaluation record") as caught:
            read_metrics(path)
        assert len(caught.value.problems) == 1

    def test_a_full_disk_costs_nothing_once_it_is_free_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "m.jsonl"
        with MetricsWriter(path) as writer:
            writer.write(STEP)
            size = path.stat().st_size
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
                for _ in range(2):
                    writer.write(STEP)
                assert path.stat().st_size == size + 10
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                signal.signal(signal.SIGXFSZ, old)
            writer.write(STEP)
        assert read_metrics(path).steps == (STEP,) * 4
        [told] = capsys.readouterr().err.splitlines()
        assert told == f"{path}: cannot be written: File too large; the run goes on and tries again: free the disk"

    def test_what_a_full_disk_has_cost_is_told_at_the_end(self, capsys: pytest.CaptureFixture[str]) -> None:
        with MetricsWriter("/dev/full") as writer:
            writer.write(STEP)
            writer.write(STEP)
        first, last = capsys.readouterr().err.splitlines()
        assert first.startswith("/dev/full: cannot be written: No space left on device; the run goes on")
        assert last == "/dev/full: the last 2 lines could not be written"

    def test_missing_and_unreadable_files_are_user_errors(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="No such file"):
            read_metrics(tmp_path / "none.jsonl")
        (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
        with pytest.raises(UserError, match="not UTF-8"):
            read_metrics(tmp_path / "binary")
        with pytest.raises(UserError, match="No such file.*train.output_dir"):
            MetricsWriter(tmp_path / "nowhere" / "m.jsonl")


class TestLines:
    def test_step_line(self) -> None:
        assert step_line(STEP) == (
            "step: 20  loss: 2.8996  grad_norm: 0.9573  lr: 1.0e-05  tokens/s: 7,375  tflops: 0.53 (model 0.41)  "
            "memory: device 9.46GiB host 12.10GiB  collectives: 0.25s"
        )
        assert "collectives" not in step_line(replace(STEP, collective_wait_s=0.0))

    def test_skipped_step_is_marked(self) -> None:
        assert not STEP.skipped
        for norm in (NAN, math.inf):
            line = step_line(replace(STEP, grad_norm=norm))
            assert f"grad_norm: {norm:.4f}" in line and line.endswith("SKIPPED: gradient not finite, nothing updated")

    def test_small_tflops_keep_digits(self) -> None:
        assert "tflops: 0.0012 (model 0.00)" in step_line(replace(STEP, tflops=0.00123, model_tflops=0.0))

    def test_eval_line(self) -> None:
        assert eval_line(EvalMetrics(10, 1.23456)) == "step: 10  eval_loss: 1.2346"


def test_memory_now_sees_an_allocation() -> None:
    device_gib, before_gib = memory_now()
    block = torch.ones(64 * 2**20 // 4)
    after_gib = memory_now()[1]
    assert after_gib - before_gib > 0.05, block.shape
    assert device_gib == 0.0 or torch.cuda.is_available()


class TestPlot:
    def png_size(self, path: Path) -> tuple[int, int]:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        return struct.unpack(">II", data[16:24])

    @pytest.mark.parametrize("losses", [[], [2.5], [2.5, NAN, 2.0], [NAN, NAN], [3 - 0.01 * i for i in range(200)]])
    @pytest.mark.parametrize("evals", [[], [EvalMetrics(0, 3.0), EvalMetrics(3, NAN)]])
    def test_draws_runs_of_any_length(self, tmp_path: Path, losses: list[float], evals: list[EvalMetrics]) -> None:
        steps = [replace(STEP, step=number, loss=loss) for number, loss in enumerate(losses, start=1)]
        path = write(tmp_path / "m.jsonl", *steps, *evals)
        plot_loss(path, tmp_path / "loss.png")
        assert self.png_size(tmp_path / "loss.png") == (960, 540)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "m.jsonl"]

    def test_picture_shows_the_losses(self, tmp_path: Path) -> None:
        pictures = []
        for number, loss in enumerate([2.0, 2.0, 1.0]):
            steps = [replace(STEP, step=1, loss=3.0), replace(STEP, step=2, loss=loss)]
            plot_loss(write(tmp_path / f"{number}.jsonl", *steps), tmp_path / f"{number}.png")
            pictures.append((tmp_path / f"{number}.png").read_bytes())
        assert pictures[0] == pictures[1] != pictures[2]

    def test_folder_that_is_not_there(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.jsonl", STEP)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            plot_loss(path, tmp_path / "nowhere" / "loss.png")

    @pytest.mark.parametrize("window", [1, 3, 7, 31])
    def test_smoothed_is_the_mean_of_the_finite_neighbours(self, window: int) -> None:
        values = np.random.default_rng(0).normal(size=20)
        values[[0, 5, 6, 7]] = [NAN, np.inf, NAN, NAN]
        half = window // 2
        for index, mean in enumerate(smoothed(values, window)):
            near = values[max(0, index - half) : index + half + 1]
            near = near[np.isfinite(near)]
            assert mean == pytest.approx(near.mean()) if len(near) else np.isnan(mean)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestProgress:
    def test_eta_leaves_the_slow_first_step_out(self) -> None:
        clock = Clock()
        with Progress(10, io.StringIO(), clock) as progress:
            assert progress.eta_s is None
            clock.now_s += 50
            progress.advance()
            assert progress.eta_s == 9 * 50
            for _ in range(4):
                clock.now_s += 2
                progress.advance()
            assert progress.eta_s == 5 * 2
            for _ in range(5):
                progress.advance()
            assert progress.eta_s == 0

    def test_log_file_gets_plain_lines_and_the_eta_now_and_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # an environment that asks for colours must not get them into a file
        monkeypatch.setenv("FORCE_COLOR", "1")
        clock, stream = Clock(), io.StringIO()
        with Progress(100, stream, clock) as progress:
            for step in range(1, 6):
                clock.now_s += 20
                progress.advance()
                progress.print(f"step: {step} [bold]")
        assert stream.getvalue().splitlines() == [
            "step: 1 [bold]",
            "step: 2 [bold]  eta: 0:32:40",
            "step: 3 [bold]",
            "step: 4 [bold]  eta: 0:32:00",
            "step: 5 [bold]",
        ]

    def test_terminal_shows_a_bar_below_whole_lines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm-256color")
        stream, clock = Terminal(), Clock()
        line = "step: 1 [bold] " + "x" * 200
        with Progress(4, stream, clock) as progress:
            clock.now_s += 60
            progress.advance()
            progress.print(line)
        text = stream.getvalue()
        # not wrapped, no markup taken for one
        assert line in text
        assert "\x1b[" in text and "1/4" in text and "eta 0:03:00" in text

    def test_dumb_terminal_gets_no_control_characters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")
        stream = Terminal()
        with Progress(4, stream, Clock()) as progress:
            progress.advance()
            progress.print("step: 1")
        assert stream.getvalue() == "step: 1\n"

    @pytest.mark.parametrize(
        ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3725.4, "1:02:05"), (360000, "100:00:00")]
    )
    def test_format_duration(self, seconds: float, text: str) -> None:
        assert format_duration(seconds) == text


SUMMARY = RunSummary(
    model="models/llama",
    num_params=8_030_261_248,
    num_trainable_params=7_504_924_672,
    param_dtype="bfloat16",
    states="masters and moments float32",
    micro_batch=4,
    accumulation_steps=2,
    num_ranks=4,
    num_steps=1200,
    zero_stage=3,
    optimizer_tier=Tier.HOST,
    host_ratio=0.9,
    schedule=Schedule.AUTO,
    planned_bytes={Tier.DEVICE: 5 * 2**29, Tier.HOST: 24 * 2**30},
)


class TestSummaries:
    def test_banner_tells_the_run(self) -> None:
        assert banner(SUMMARY).splitlines() == [
            "model        models/llama",
            "parameters   7,504,924,672 trained of 8,030,261,248 (93.5%)",
            "dtype        parameters bfloat16, masters and moments float32",
            "batch        32 samples per step = 4 per process x 2 accumulated x 4 processes",
            "steps        1,200",
            "sharding     ZeRO stage 3",
            "optimizer    states 90.0% on the host, 10.0% on the device, schedule auto",
            "plan         device 2.50GiB, host 24.00GiB per process",
        ]

    def test_banner_of_one_process_without_offload_and_plan(self) -> None:
        text = banner(replace(SUMMARY, num_ranks=1, optimizer_tier=Tier.DEVICE, planned_bytes={}))
        assert "x 1 process\n" in text and "states on the device" in text and "plan" not in text
        assert "states on the host" in banner(replace(SUMMARY, host_ratio=1.0))

    def test_banner_lists_what_the_plan_consists_of(self) -> None:
        parts = [("parameters", Tier.DEVICE, 2**30), ("optimizer states", Tier.HOST, 24 * 2**30)]
        assert banner(replace(SUMMARY, planned_parts=parts)).splitlines()[-3:] == [
            "plan         device 2.50GiB, host 24.00GiB per process",
            "               parameters        device   1.00GiB",
            "               optimizer states  host    24.00GiB",
        ]

    def test_columns_of_the_plan_are_as_wide_as_what_stands_in_them(self) -> None:
        sizes = {field.name: 10**12 for field in fields(MemoryPlan) if field.name.endswith("_bytes")}
        parts = MemoryPlan(**sizes).rows()
        assert len(parts) == 8
        for is_host in (False, True):
            summary = replace(SUMMARY, planned_parts=parts, device_is_host=is_host)
            lines = banner(summary).splitlines()[-len(parts) :]
            for line, (name, tier, _) in zip(lines, parts, strict=True):
                columns = re.split(r" {2,}", line.strip())
                assert columns == [name, tier.value + (" tier" if is_host else ""), "931.32GiB"]
            assert len({line.index("GiB") for line in lines}) == 1 and len({len(line) for line in lines}) == 1

    def test_banner_without_an_accelerator_does_not_speak_of_device_memory(self) -> None:
        text = banner(replace(SUMMARY, device_is_host=True, planned_parts=[("parameters", Tier.DEVICE, 2**30)]))
        assert text.splitlines()[-2:] == [
            "plan         all in host memory: device tier 2.50GiB, host tier 24.00GiB per process",
            "               parameters  device tier  1.00GiB",
        ]
        text = banner(replace(SUMMARY, device_is_host=True, optimizer_tier=Tier.DEVICE))
        assert "states on the device tier, which is host memory here" in text

    def test_end_summary_without_an_accelerator(self) -> None:
        metrics = RunMetrics((replace(STEP, mem_device_gib=0.0, mem_host_gib=5.0),), ())
        assert "peak memory  host 5.00GiB" in end_summary(metrics, "m").splitlines()

    def test_end_summary(self) -> None:
        steps = [
            replace(STEP, step=1, loss=3.0, tokens_per_s=10.0, mem_device_gib=1.0, mem_host_gib=4.0),
            replace(STEP, step=2, loss=NAN, grad_norm=NAN, tokens_per_s=900.0, mem_device_gib=2.0, mem_host_gib=5.0),
            replace(STEP, step=3, loss=2.0, tokens_per_s=1000.0, mem_device_gib=2.0, mem_host_gib=3.0),
        ]
        metrics = RunMetrics(tuple(steps), (EvalMetrics(0, 3.5), EvalMetrics(3, 2.25)))
        assert end_summary(metrics, "runs/a/model", ["first", "second"]).splitlines() == [
            "model        runs/a/model",
            "loss         3.0000 -> 2.0000 in 3 steps",
            "eval loss    3.5000 -> 2.2500",
            "skipped      1 step with a gradient that was not finite",
            "tokens/s     900 (median)",
            "peak memory  device 2.00GiB, host 5.00GiB",
            "try next     first",
            "             second",
        ]

    def test_end_summary_of_runs_with_nothing_to_say(self) -> None:
        assert end_summary(RunMetrics((), ()), "m") == "model        m"
        one = end_summary(RunMetrics((replace(STEP, loss=3.0),), ()), "m")
        assert "loss         3.0000 in 1 step\n" in one
        assert "loss" not in end_summary(RunMetrics((replace(STEP, loss=NAN),), ()), "m")
