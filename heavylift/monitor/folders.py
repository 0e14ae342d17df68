"""The folder of a sink that writes files."""

from __future__ import annotations

import os
from pathlib import Path

from heavylift.errors import UserError


def log_folder(kind: str, output_path: str | None, job_name: str) -> Path:
    """The folder `output_path`/`job_name`, made; no path: the working folder. Raises UserError where that fails."""
    folder = Path(os.path.expanduser(output_path or "")) / job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"monitor {kind}: {folder}: cannot be made: {reason}; change output_path or job_name") from None
    return folder
