"""Numbers of a profile as people read them: 1.24 GFLOPS, 0.6 GMACs, 135.1 M, 3.2 ms."""

from __future__ import annotations

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
PRECISION = 2


def number_to_string(num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`num` with a unit letter (T, G, M, k, m, u), the largest that leaves at least 1 unless given: `1.24 M`."""
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if abs(num) >= size), "" if num == 0 else "u")
    # K is what older scripts ask for
    size = _UNITS["k" if units == "K" else units]
    return f"{round(num / size, precision):g} {units}".rstrip()


def macs_to_string(macs: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Multiply-accumulates: `0.62 GMACs`."""
    return _with_word(macs, "MACs", units, precision)


def flops_to_string(flops: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Floating-point operations (or, per second, the same word): `1.24 GFLOPS`."""
    return _with_word(flops, "FLOPS", units, precision)


def params_to_string(params_num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Parameters: `135.1 M`."""
    return number_to_string(params_num, units, precision)


def duration_to_string(duration: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`duration` in seconds: `3.2 ms`."""
    return _with_word(duration, "s", units, precision)


def _with_word(number: float, word: str, units: str | None, precision: int) -> str:
    text, _, unit = number_to_string(number, units, precision).partition(" ")
    return f"{text} {unit}{word}"
