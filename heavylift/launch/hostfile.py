"""Which machines and which slots of them: the hostfile, `--include`, `--exclude`, `--num_nodes`, `--num_gpus`.

Everything wrong is collected and raised at once as UserError. A slot is a GPU, counted from 0 among those that the
machine's CUDA_VISIBLE_DEVICES leaves, or a process where there are no GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from heavylift.errors import UserError

Slots = dict[str, list[int]]
"""Host name -> slots in use, in the order of the ranks."""

_LINE = re.compile(r"(?P<host>[^\s#=]+)\s+slots=(?P<slots>\d{1,5})\s*(?:#.*)?")
_SLOTS = re.compile(r"(\d{1,5})(?:\s*-\s*(\d{1,5}))?")  # a longer number would fill the memory with its range


def read_hostfile(path: Path) -> dict[str, int]:
    """Slots per host, in the file's order: lines `host slots=n`, empty lines and `#` comments.

    Raises UserError with every bad line and its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"--hostfile {path}: cannot be read: {reason}") from None
    hosts: dict[str, int] = {}
    first_line: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            problems.append(f"{path}:{number}: expected 'host slots=n', got {text[:80]!r}")
            continue
        host, slots = match["host"], int(match["slots"])
        if host in first_line:
            problems.append(f"{path}:{number}: host {host} stands in line {first_line[host]} already; give it once")
        elif slots == 0:
            problems.append(f"{path}:{number}: host {host} has no slots; give it one per GPU or remove the line")
        first_line.setdefault(host, number)
        hosts[host] = slots
    if not hosts and not problems:
        problems.append(f"{path}: names no host; expected lines 'host slots=n'")
    if problems:
        raise UserError(*problems)
    return hosts


def choose(
    hosts: Mapping[str, int],
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> Slots:
    """Hosts and slots to use, of those there are (host -> number of slots).

    include, exclude: `host:0,2@host2`, slots as numbers or ranges, a host alone stands for all its slots. num_nodes,
    num_gpus: only the first so many hosts, and slots of each. Raises UserError.
    """
    if include is not None and exclude is not None:
        raise UserError("--include and --exclude cannot be used together; give one of them")
    if (include is not None or exclude is not None) and (num_nodes is not None or num_gpus is not None):
        flag = "--include" if include is not None else "--exclude"
        limit = "--num_nodes" if num_nodes is not None else "--num_gpus"
        raise UserError(f"{flag} cannot be used together with {limit}; give one of them")
    chosen: Slots = {host: list(range(count)) for host, count in hosts.items()}
    if include is not None:
        chosen = {host: slots for host, slots in _parse_filter("--include", include, hosts).items() if slots}
    elif exclude is not None:
        for host, slots in _parse_filter("--exclude", exclude, hosts).items():
            chosen[host] = [slot for slot in chosen[host] if slot not in slots]
        chosen = {host: slots for host, slots in chosen.items() if slots}
        if not chosen:
            raise UserError(f"--exclude {exclude}: nothing is left to run on")
    return _limited(chosen, num_nodes, num_gpus)


def _limited(chosen: Slots, num_nodes: int | None, num_gpus: int | None) -> Slots:
    problems = []
    if num_nodes is not None and num_nodes > len(chosen):
        problems.append(f"--num_nodes {num_nodes}: there are {len(chosen)} hosts ({', '.join(chosen)})")
    hosts = list(chosen)[:num_nodes]
    if num_gpus is not None:
        problems += [
            f"--num_gpus {num_gpus}: host {host} has {len(chosen[host])} slots"
            for host in hosts
            if num_gpus > len(chosen[host])
        ]
    if problems:
        raise UserError(*problems)
    return {host: chosen[host][:num_gpus] for host in hosts}


def _parse_filter(flag: str, text: str, hosts: Mapping[str, int]) -> Slots:
    """Slots that a filter names, in its order of hosts."""
    problems: list[str] = []
    named: Slots = {}
    for part in text.split("@"):
        host, colon, listed = part.strip().partition(":")
        if host not in hosts:
            known = ", ".join(hosts)
            problems.append(f"{flag} {text}: unknown host {host!r}; known: {known}")
            continue
        if host in named:
            problems.append(f"{flag} {text}: host {host} is named twice")
            continue
        slots = _parse_slots(listed) if colon else list(range(hosts[host]))
        if slots is None:
            problems.append(f"{flag} {text}: expected slots such as {host}:0,2 or {host}:0-3, got {part.strip()!r}")
            continue
        unknown = [slot for slot in slots if slot >= hosts[host]]
        if unknown:
            problems.append(f"{flag} {text}: host {host} has slots 0 to {hosts[host] - 1}, not {_words(unknown)}")
        if len(set(slots)) < len(slots):
            problems.append(f"{flag} {text}: a slot of host {host} is named twice")
        named[host] = slots
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return named


def _parse_slots(text: str) -> list[int] | None:
    slots: list[int] = []
    for part in text.split(","):
        match = _SLOTS.fullmatch(part.strip())
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            return None
        slots += range(first, last + 1)
    return slots


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
