"""What a key of ds_config.json carries beside its type: whether it does anything here, and what, or why not.

The blocks (`zero.py`, `precision.py`, `training.py`, `refused.py`, `schema.py`) declare their keys with these words:

    stage: Annotated[Whole, Field(ge=0, le=3), done("What is sharded: ...")] = 0

Parsing, `heavylift config explain` and docs/deepspeed_config.md all read them, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictBool
from pydantic.fields import FieldInfo


class Status(StrEnum):
    """What heavylift does with a key."""

    DONE = "done"
    """It has its meaning."""
    NO_EFFECT = "no effect"
    """Accepted, changes nothing; said once, with why."""
    REFUSED = "refused"
    """An error that names what to use instead, unless its value leaves the feature off."""


@dataclass(frozen=True)
class Key:
    """Metadata of one key."""

    status: Status
    text: str
    """What it means here; why it has no effect; or what to use instead."""
    there: str | None = None
    """DeepSpeed's default in words, where it is not the one of the schema."""
    aliases: tuple[str, ...] = ()
    """Older and other names of the key."""
    agrees: tuple[Any, ...] = ()
    """Values that ask for nothing that heavylift does not do: no note, no refusal."""
    takes_auto: bool = True
    """Whether DeepSpeed or Hugging Face understand "auto" here."""
    own_auto: bool = False
    """Whether "auto" is one of the key's own values, which nobody fills in."""
    block_keys: tuple[str, ...] = ()
    """Keys of a block that is refused as a whole; `...` among them: not all are known."""
    asks: Callable[[dict[str, Any]], bool] | None = None
    """For such a block: whether its content asks for the feature."""
    unasked: str = ""
    """For such a block: what is said about content that does not ask for it."""

    def agrees_with(self, value: Any) -> bool:
        """Whether `value` needs no note and no refusal."""
        # True == 1 in Python: a switch and a number must not be mixed up
        return any(type(value) is type(one) and value == one for one in self.agrees)


def done(
    text: str, *, there: str | None = None, aliases: tuple[str, ...] = (), auto: bool = True, own_auto: bool = False
) -> Key:
    """A key that has its meaning."""
    return Key(Status.DONE, text, there, aliases, takes_auto=auto, own_auto=own_auto)


def no_effect(
    why: str,
    *,
    agrees: tuple[Any, ...] = (),
    aliases: tuple[str, ...] = (),
    there: str | None = None,
    auto: bool = True,
) -> Key:
    """A key that is accepted and changes nothing."""
    return Key(Status.NO_EFFECT, why, there, aliases, (None, *agrees), auto)


def refused(
    instead: str, *, agrees: tuple[Any, ...] = (False,), aliases: tuple[str, ...] = (), there: str | None = None
) -> Key:
    """A key that is an error unless its value is one of `agrees`."""
    return Key(Status.REFUSED, instead, there, aliases, (None, *agrees))


def is_enabled(block: dict[str, Any]) -> bool:
    """Whether a block's `enabled` is anything but false: what most blocks ask by."""
    return block.get("enabled", False) not in (False, None)


def has_content(block: dict[str, Any]) -> bool:
    """Whether a block says anything at all, other than that it is off."""
    return any(value not in (False, None, "auto") for value in block.values())


def refused_block(
    instead: str, keys: str, asks: Callable[[dict[str, Any]], bool] = is_enabled, unasked: str = ""
) -> Key:
    """A block that is an error where its content asks for the feature. `keys`: its keys, separated by blanks."""
    return Key(Status.REFUSED, instead, "off", block_keys=tuple(keys.split()), asks=asks, unasked=unasked)


class Block(BaseModel):
    """Base of all blocks: frozen, unknown keys refused, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    switch: ClassVar[str | None] = None
    """The key that turns the block on; None: it always counts."""
    off_values: ClassVar[tuple[Any, ...]] = (False, None)
    """Values of `switch` that leave it off."""

    @classmethod
    def is_off(cls, raw: dict[str, Any]) -> bool:
        """Whether the file's block (canonical names, no "auto") is switched off, so that its keys do nothing."""
        if cls.switch is None:
            return False
        value = raw.get(cls.switch, cls.model_fields[cls.switch].default)
        return any(type(value) is type(off) and value == off for off in cls.off_values)


def key_of(field: FieldInfo) -> Key:
    """The `Key` of a field of a block."""
    found = [item for item in field.metadata if isinstance(item, Key)]
    assert len(found) == 1, f"{len(found)} keys in {field}"
    return found[0]


def block_of(field: FieldInfo) -> type[Block] | None:
    """The block that a field holds, or None for a value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Block) else None


def canonical_names(block: type[Block]) -> dict[str, str]:
    """Every name that a key of the block may be written by -> the name of its field."""
    names = {name: name for name in block.model_fields}
    for name, field in block.model_fields.items():
        for alias in key_of(field).aliases:
            assert alias not in names, f"{alias} stands for {names[alias]} and {name}"
            names[alias] = name
    return names


def _whole(value: Any) -> Any:
    # 5e8 is how people write element counts; True is an int in Python and none here
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("expected a whole number")
    if isinstance(value, Integral):
        return int(value)
    if float(value) != float(value) // 1:
        raise ValueError("expected a whole number")
    return int(float(value))


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("expected a number that a float can hold") from None


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Switch = StrictBool
