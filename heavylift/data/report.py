"""What the user sees about the data before the first step: counts, losses on the way, one sample as it is trained.

Holds only plain values, so that it can be stored beside the cached tokens. Printing is the caller's business.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.markup import escape

MAX_DROPPED_LISTED = 20
_SHOWN_DROPPED = 5
_SHOWN_SAMPLE_CHARS = 1200


@dataclass(frozen=True)
class DataReport:
    """How the rows became samples. Counts are of the whole data set, before the validation split."""

    sources: tuple[str, ...]
    """The files, or what else the samples came from."""
    num_rows: int
    """Rows read (after `data.num_samples`)."""
    num_samples: int
    """Rows used."""
    num_dropped: int = 0
    """Rows not used."""
    dropped: tuple[tuple[str, str], ...] = ()
    """(file:line, reason) of the first `MAX_DROPPED_LISTED` of them."""
    num_cut: int = 0
    """Samples truncated to the cut-off length."""
    cutoff_len: int | None = None
    """That length in tokens; None: no limit known."""
    num_tokens: int = 0
    """Tokens of all samples."""
    num_trained_tokens: int = 0
    """Those with a loss."""
    longest: int = 0
    """Tokens of the longest sample."""
    train_on_inputs: bool = False
    """Are prompts trained too?"""
    sample: tuple[tuple[str, bool], ...] = ()
    """One sample, decoded: (text, trained) pieces in order; empty where nothing can be decoded."""
    notes: tuple[str, ...] = ()
    """Further things worth knowing, one line each."""

    def to_json(self) -> str:
        """One JSON line; `from_json` gives an equal object back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DataReport:
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError on anything else."""
        values = json.loads(text)
        for key in ("sources", "notes"):
            values[key] = tuple(values[key])
        for key in ("dropped", "sample"):
            values[key] = tuple(tuple(pair) for pair in values[key])
        return cls(**values)


def report_lines(report: DataReport) -> list[str]:
    """The report as lines with rich markup; text from the data is escaped."""
    share = report.num_trained_tokens / max(1, report.num_tokens)
    what = "prompts and answers" if report.train_on_inputs else "answers only"
    lines = [
        f"[bold]data[/bold] {escape(', '.join(report.sources))}",
        f"  {report.num_samples:,} of {report.num_rows:,} rows used"
        + (f", {report.num_dropped:,} dropped" if report.num_dropped else "")
        + (f", {report.num_cut:,} cut to {report.cutoff_len:,} tokens" if report.num_cut else ""),
        f"  {report.num_tokens:,} tokens, {report.num_trained_tokens:,} trained ({share:.0%}: {what}), "
        f"longest sample {report.longest:,}" + (f" of {report.cutoff_len:,} allowed" if report.cutoff_len else ""),
    ]
    lines += [f"  dropped {escape(source)}: {escape(reason)}" for source, reason in report.dropped[:_SHOWN_DROPPED]]
    if report.num_dropped > _SHOWN_DROPPED:
        lines.append(f"  ... and {report.num_dropped - _SHOWN_DROPPED:,} more dropped")
    lines += [f"  [yellow]note[/yellow] {escape(note)}" for note in report.notes]
    if report.sample:
        lines.append("  a sample, the trained part [green]green between » and «[/green]:")
        lines += [f"  | {line}" for line in _marked_sample(report.sample)]
    return lines


def _marked_sample(pieces: tuple[tuple[str, bool], ...]) -> list[str]:
    """The pieces as lines of markup. The marks stay readable where colours are not shown (log files)."""
    left = _SHOWN_SAMPLE_CHARS
    lines = [""]
    for text, trained in pieces:
        shown = text[:left]
        left -= len(shown)
        if trained:
            shown = f"»{shown}" + ("«" if len(shown) == len(text) else "")
        for i, part in enumerate(shown.split("\n")):
            if i:
                lines.append("")
            # markup must not run over a line end: each line is printed on its own
            lines[-1] += f"[green]{escape(part)}[/green]" if trained and part else escape(part)
        if left <= 0:
            lines[-1] += " ..."
            break
    return lines
