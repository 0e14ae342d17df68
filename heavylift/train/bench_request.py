"""What `heavylift bench` asks of rank 0, handed over as a file. No torch here: the command checks it first."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from heavylift.errors import UserError


@dataclass(frozen=True)
class BenchRequest:
    """Where the result goes and what it leaves out."""

    name: str
    path: str
    """The JSON file to write."""
    num_warmup_steps: int
    """First steps that the statistics leave out."""
    started_unix_s: float
    """When the command began, seconds since 1970."""

    def check(self, num_steps: int) -> None:
        """Raises UserError when warm-up leaves no step of `num_steps`."""
        if self.num_warmup_steps >= num_steps:
            raise UserError(
                f"--warmup: expected fewer than the {num_steps} steps of the run, got {self.num_warmup_steps}; "
                "raise train.max_steps or lower --warmup"
            )

    def write(self, path: Path) -> None:
        """As a file for the workers."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> BenchRequest:
        """What `write` has written."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
