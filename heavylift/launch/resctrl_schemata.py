"""The arithmetic of the kernel's resource control: schemata lines, cache masks, steps of memory bandwidth.

Formats: Documentation/filesystems/resctrl.rst of the Linux kernel. `L3:0=fffff;1=fffff` gives each cache domain a mask
of ways, `MB:0=100;1=100` each a percentage (or MiB per second where the file system is mounted with mba_MBps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heavylift.errors import UserError

PARTS = ("step", "rest")
"""The CPU step's threads, and everything else of the run."""


def parse_shares(text: str) -> dict[str, int]:
    """Per cent of each part: `step=70,rest=30`; a part left out gets what remains.

    Raises UserError for another name, a number outside 1 to 99, or a sum over 100.
    """
    shares: dict[str, int] = {}
    for item in text.split(","):
        name, equals, number = (part.strip() for part in item.partition("="))
        if name not in PARTS or not equals or not number.isdecimal() or not 1 <= int(number) <= 99:
            raise UserError(
                f"--resctrl {text!r}: expected per cents (1 to 99) as in step=70,rest=30, got {item.strip()!r}"
            )
        if name in shares:
            raise UserError(f"--resctrl {text!r}: {name} is given twice")
        shares[name] = int(number)
    for name in PARTS:
        shares.setdefault(name, 100 - sum(shares.values()))
    if sum(shares.values()) > 100 or min(shares.values()) < 1:
        raise UserError(
            f"--resctrl {text!r}: the parts come to {sum(shares.values())} per cent, at most 100 can be given"
        )
    return shares


def parse_schemata(text: str) -> dict[str, dict[int, str]]:
    """Resource -> domain -> value, as written, of a `schemata` file. Raises ValueError for a line of another form."""
    found: dict[str, dict[int, str]] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        resource, _, domains = line.strip().partition(":")
        pairs = [domain.partition("=") for domain in domains.split(";") if domain.strip()]
        if not pairs or not all(number.strip().isdecimal() and value.strip() for number, _, value in pairs):
            raise ValueError(f"expected lines such as L3:0=ff;1=ff, got {line.strip()!r}")
        found[resource.strip()] = {int(number): value.strip() for number, _, value in pairs}
    return found


def schemata_line(resource: str, values: Mapping[int, str]) -> str:
    """The line that gives each domain of a resource its value."""
    return f"{resource}:" + ";".join(f"{domain}={value}" for domain, value in sorted(values.items()))


def split_ways(mask: int, min_bits: int, shares: Sequence[int]) -> list[int]:
    """Disjoint masks, each a run of neighbouring ways of `mask`, as near to the shares (per cent) as whole ways allow.

    mask: all ways, as in `cbm_mask`. min_bits: the least ways of a group. Raises ValueError when there are too few ways
    or `mask` is not one run itself.
    """
    num_ways, lowest = mask.bit_count(), (mask & -mask).bit_length() - 1
    if not mask or mask >> lowest != (1 << num_ways) - 1:
        raise ValueError(f"its ways are no run of neighbours ({mask:x})")
    if num_ways < min_bits * len(shares):
        raise ValueError(f"{num_ways} cache ways are too few for {len(shares)} parts of at least {min_bits}")
    counts = [max(min_bits, round(num_ways * share / 100)) for share in shares]
    while sum(counts) > num_ways:
        counts[counts.index(max(counts))] -= 1
    masks, start = [], lowest
    for count in counts:
        masks.append(((1 << count) - 1) << start)
        start += count
    return masks


def bandwidth_percent(share: int, least: int, step: int) -> int:
    """`share` per cent of the memory bandwidth, rounded up to the hardware's steps of `step`, from `least` on.

    Raises ValueError for a step that is none.
    """
    if step < 1:
        raise ValueError(f"it goes in steps of {step} per cent")
    return min(100, max(least, -(-share // step) * step))
