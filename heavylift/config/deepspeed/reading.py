"""The raw file, key by key: names made canonical, "auto" filled, refusals and notes found, types checked.

`read_config` walks the file beside the schema. It collects every problem, and a report on every key that the file
gives, which `heavylift config explain` shows. What keys mean together is left to `checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from heavylift.config.deepspeed.auto import AUTO
from heavylift.config.deepspeed.batch import ACCUMULATION, MICRO, TRAIN
from heavylift.config.deepspeed.keys import Block, Status, block_of, canonical_names, has_content, key_of
from heavylift.config.deepspeed.schema import DeepSpeedConfig
from heavylift.config.deepspeed.torch_optimizers import TORCH_OPTIMIZERS
from heavylift.config.deepspeed.training import OURS, SCHEDULERS, AdamParams
from heavylift.config.words import expected, named, nearest, shown

Path = tuple[str, ...]


@dataclass(frozen=True)
class KeyReport:
    """One key of the file: what came, what it comes to."""

    path: str
    """As the file has it."""
    value: Any
    status: str
    """`done`, `no effect`, `refused`, `off`, `auto`, `comment` or `error`."""
    text: str


@dataclass
class Reading:
    """What came out of the file."""

    source: str
    config: Any
    """A `DeepSpeedConfig`; keys with a problem have their defaults."""
    params: dict[str, Block]
    """`optimizer` and `scheduler` -> their typed params, where heavylift knows the type."""
    written: dict[str, str]
    """Canonical path of each known key that the file gives -> the key as the file has it."""
    given: frozenset[str]
    """Canonical paths of the keys that the file gives a value."""
    filled: frozenset[str]
    """Those among them that were "auto" and got a trainer's value."""
    open_autos: frozenset[str]
    """Canonical paths that stayed "auto"."""
    reports: list[KeyReport]
    problems: list[tuple[str, str]]
    """(key as the file has it, message without its source)."""
    notes: list[str]
    bad: frozenset[str]
    """Canonical paths whose value could not be used: nothing must be concluded from them."""


@dataclass
class _Walk:
    fillings: Mapping[str, Any]
    written: dict[Path, str] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    open_autos: set[str] = field(default_factory=set)
    reports: list[KeyReport] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)

    def problem(self, path: Path, written: str, message: str, value: Any = None, status: str = "error") -> None:
        self.problems.append((written, f"{written}: {message}"))
        self.bad.add(".".join(path))
        self.reports.append(KeyReport(written, value, status, message))

    def report(self, written: str, value: Any, status: str, text: str) -> None:
        self.reports.append(KeyReport(written, value, status, text))

    def note(self, written: str, value: Any, text: str, status: str = "no effect") -> None:
        self.notes.append(f"{written}: {text}")
        self.report(written, value, status, text)


def read_config(raw: Mapping[str, Any], source: str, fillings: Mapping[str, Any]) -> Reading:
    """Walks the file. Raises nothing: problems are in the result."""
    walk = _Walk(fillings)
    tree = _walk_block(walk, DeepSpeedConfig, raw, (), "", off=False)
    params: dict[str, Block] = {}
    for name in ("optimizer", "scheduler"):
        block = _params_block(name, tree.get(name, {}).get("type"))
        if block is not None:
            params[name] = _validated(walk, block, tree[name].pop("params", {}), (name, "params"))
    config = _validated(walk, DeepSpeedConfig, tree, ())
    _report_done(walk)
    return Reading(
        source=source,
        config=config,
        params=params,
        written={".".join(path): written for path, written in walk.written.items()},
        given=frozenset(".".join(path) for path in walk.values),
        filled=frozenset(walk.filled),
        open_autos=frozenset(walk.open_autos),
        reports=walk.reports,
        problems=walk.problems,
        notes=walk.notes,
        bad=frozenset(walk.bad),
    )


def _params_block(name: str, type_name: Any) -> type[Block] | None:
    """The block that types `NAME.params` for an optimizer or scheduler type; None: not a type that is there."""
    if not isinstance(type_name, str):
        return None
    if name == "optimizer" and type_name.lower() in OURS:
        return AdamParams
    kinds: Mapping[str, type[Block]] = TORCH_OPTIMIZERS if name == "optimizer" else SCHEDULERS
    return {known.lower(): block for known, block in kinds.items()}.get(type_name.lower())


def _walk_block(
    walk: _Walk, block: type[Block], raw: Mapping[Any, Any], path: Path, prefix: str, *, off: bool
) -> dict[str, Any]:
    """The block's usable values by canonical name."""
    names = canonical_names(block)
    entries: dict[str, tuple[str, Any]] = {}
    for name, value in raw.items():
        if isinstance(name, str) and _is_comment(name):
            walk.report(prefix + named(name), value, "comment", "a comment")
            continue
        written = prefix + (named(name) if isinstance(name, str) else shown(name))
        canonical = names.get(name) if isinstance(name, str) else None
        dotted = _dotted(name) if canonical is None and block is DeepSpeedConfig else None
        if dotted is not None and key_of(dotted).status is Status.NO_EFFECT:
            # libraries write these beside the block, for models that are not trained, and DeepSpeed drops them
            walk.note(prefix + str(name), value, f"no effect: {key_of(dotted).text}")
        elif canonical is None:
            walk.problem((*path, str(name)[:60]), written, _unknown(name, block, prefix), value)
        elif canonical in entries:
            walk.problem((*path, canonical), written, f"means {entries[canonical][0]}, given too; remove one", value)
        else:
            entries[canonical] = (written, _legacy(walk, block, canonical, written, value))
    usable = {name: _filled(walk, (*path, name), value) for name, (_, value) in entries.items()}
    off = off or block.is_off({name: value for name, value in usable.items() if not _is_auto(value)})
    result: dict[str, Any] = {}
    # `type` first: it says what `params` may hold
    for name in sorted(entries, key=lambda name: name != "type"):
        written = entries[name][0]
        field_info = block.model_fields[name]
        found = _walk_key(walk, field_info, (*path, name), written, usable[name], off=off)
        if found is not _NOTHING:
            result[name] = found
    return result


_NOTHING = object()
PENDING = (TRAIN, MICRO, ACCUMULATION, "total_num_steps", "cycle_min_lr", "cycle_max_lr")
"""Keys without a default of their own: what an open "auto" there comes to is decided when everything is known."""


def _filled(walk: _Walk, path: Path, value: Any) -> Any:
    """The value, or what a trainer knows in place of "auto"."""
    name = ".".join(path)
    if _is_auto(value) and name in walk.fillings:
        walk.filled.add(name)
        return walk.fillings[name]
    return value


def _walk_key(walk: _Walk, field_info: FieldInfo, path: Path, written: str, value: Any, *, off: bool) -> Any:
    """The key's value for pydantic, or `_NOTHING` where it has none to give."""
    key = key_of(field_info)
    walk.written[path] = written
    if _is_auto(value) and not key.own_auto:
        return _take_auto(walk, field_info, path, written)
    inner = block_of(field_info)
    if inner is not None or key.block_keys or path[-1] == "params":
        if value is None:
            walk.report(written, value, "off", "null: as if it were not there")
            return _NOTHING
        if not isinstance(value, Mapping):
            walk.problem(path, written, f"expected a mapping, got {shown(value)}; change it to {{...}}", value)
            return _NOTHING
    if inner is not None:
        return _walk_block(walk, inner, value, path, written + ".", off=off)
    if key.block_keys:
        _walk_refused_block(walk, field_info, path, written, dict(value))
        return _NOTHING
    if path in (("optimizer", "params"), ("scheduler", "params")):
        return _walk_params(walk, path, written, value)
    return _walk_value(walk, field_info, path, written, value, off=off)


def _walk_value(walk: _Walk, field_info: FieldInfo, path: Path, written: str, value: Any, *, off: bool) -> Any:
    key = key_of(field_info)
    if _has_nul(value):
        walk.problem(path, written, "expected text without NUL characters", value)
        return _NOTHING
    if key.status is Status.REFUSED and not off and not key.agrees_with(value):
        walk.problem(path, written, f"heavylift does not have this; {key.text}", value, "refused")
        return _NOTHING
    walk.values[path] = value
    if off:
        walk.report(written, value, "off", "the block is off")
    elif key.status is Status.NO_EFFECT and not key.agrees_with(value):
        walk.note(written, value, f"no effect: {key.text}")
    elif key.status is Status.NO_EFFECT:
        walk.report(written, value, "done", f"as it is here: {key.text}")
    elif key.status is Status.REFUSED:
        walk.report(written, value, "off", "not asked for")
    return value


def _take_auto(walk: _Walk, field_info: FieldInfo, path: Path, written: str) -> Any:
    key = key_of(field_info)
    if not key.takes_auto:
        takes = expected(field_info)
        walk.problem(path, written, f'expected {takes}, got "auto", which nothing fills in here', AUTO)
        return _NOTHING
    walk.open_autos.add(".".join(path))
    if path[-1] in PENDING:
        walk.report(written, AUTO, "auto", "to be filled in, or solved from the others")
    elif key.status is Status.DONE and block_of(field_info) is None:
        default = field_info.get_default(call_default_factory=True)
        default = list(default) if isinstance(default, tuple) else default
        said = shown(default) if default is not None else "its default"
        walk.note(written, AUTO, f'"auto" that nobody filled in: {said}', "auto")
    else:
        walk.report(written, AUTO, key.status, key.text)
    return _NOTHING


def _walk_refused_block(walk: _Walk, field_info: FieldInfo, path: Path, written: str, value: dict[Any, Any]) -> None:
    key = key_of(field_info)
    assert key.asks is not None
    if key.asks(value):
        walk.problem(path, written, f"heavylift does not have this; {key.text}", value, "refused")
        return
    if key.unasked and has_content(value):
        walk.note(written, value, f"no effect: {key.unasked}")
    else:
        walk.report(written, value, "off", "the block is off")
    if "..." in key.block_keys:
        return
    for name in value:
        if name not in key.block_keys:
            walk.problem((*path, str(name)[:60]), f"{written}.{named(str(name))}", _unlisted(name, key.block_keys))


def _walk_params(walk: _Walk, path: Path, written: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    """Arguments of an optimizer or scheduler; of a type that is not there, a problem itself, as they are."""
    type_name = walk.values.get((path[0], "type"))
    block = _params_block(path[0], type_name)
    if block is not None:
        return _walk_block(walk, block, value, path, written + ".", off=False)
    result: dict[str, Any] = {}
    for name, argument in value.items():
        here = f"{written}.{named(str(name))}"
        argument = _filled(walk, (*path, str(name)), argument)
        if not isinstance(name, str):
            walk.problem(path, here, "expected a name before the colon")
        elif name == "max_grad_norm":
            walk.problem((*path, name), here, "heavylift does not have this; use the top-level key gradient_clipping")
        elif _is_auto(argument):
            walk.note(here, AUTO, '"auto" that nobody filled in', "auto")
        else:
            walk.values[(*path, name)] = argument
            walk.written[(*path, name)] = here
            result[name] = argument
    return result


def _legacy(walk: _Walk, block: type[Block], name: str, written: str, value: Any) -> Any:
    """Old shapes of a value: `zero_optimization: true` was stage 1."""
    if block is DeepSpeedConfig and name == "zero_optimization" and isinstance(value, bool):
        walk.note(written, value, f"old form, read as {{stage: {int(value)}}}", "done")
        return {"stage": int(value)}
    return value


def _validated(walk: _Walk, block: type[Block], tree: dict[str, Any], path: Path) -> Any:
    """The typed block; what cannot be used is reported and left out."""
    try:
        return block.model_validate(tree)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            loc, field_info = _locate(block, item["loc"])
            if (*path, *loc) in walk.values:
                value = walk.values.pop((*path, *loc))
                written = walk.written[(*path, *loc)]
                walk.problem(
                    (*path, *loc), written, f"expected {expected(field_info)}, got {shown(value)}{_hint(value)}", value
                )
                _remove(tree, loc)
    return block.model_validate(tree)


def _locate(block: type[Block], loc: tuple[int | str, ...]) -> tuple[Path, FieldInfo]:
    """The path of the field that a pydantic error is about (union branches and list indices cut off)."""
    path: list[str] = []
    while True:
        name = str(loc[len(path)])
        path.append(name)
        field_info = block.model_fields[name]
        inner = block_of(field_info)
        if inner is None or len(loc) == len(path):
            return tuple(path), field_info
        block = inner


def _remove(tree: dict[str, Any], path: Path) -> None:
    for name in path[:-1]:
        tree = tree[name]
    tree.pop(path[-1], None)


def _report_done(walk: _Walk) -> None:
    """Reports on the keys that simply have their meaning."""
    told = {report.path for report in walk.reports}
    for path, value in walk.values.items():
        written = walk.written[path]
        if written in told:
            continue
        field_info = _field_at(path, walk)
        text = key_of(field_info).text if field_info is not None else "its type is not there"
        filled = " (filled in for auto)" if ".".join(path) in walk.filled else ""
        walk.report(written, value, "done", text + filled)


def _field_at(path: Path, walk: _Walk) -> FieldInfo | None:
    block: type[Block] | None = DeepSpeedConfig
    found: FieldInfo | None = None
    for depth, name in enumerate(path):
        if block is None or name not in block.model_fields:
            return None
        found = block.model_fields[name]
        block = block_of(found)
        if path[: depth + 1] in (("optimizer", "params"), ("scheduler", "params")):
            block = _params_block(path[0], walk.values.get((path[0], "type")))
    return found


def _dotted(name: Any) -> FieldInfo | None:
    """The key that a dotted name at the top (`zero_optimization.stage`) means; None: not one of a block."""
    block: type[Block] | None = DeepSpeedConfig
    found: FieldInfo | None = None
    for part in name.split(".") if isinstance(name, str) and "." in name else ():
        canonical = None if block is None else canonical_names(block).get(part)
        if block is None or canonical is None:
            return None
        found = block.model_fields[canonical]
        block = block_of(found)
    return found


def _unknown(name: Any, block: type[Block], prefix: str) -> str:
    if not isinstance(name, str):
        return "expected a name before the colon"
    if block is DeepSpeedConfig and _dotted(name) is not None:
        inner, _, last = name.rpartition(".")
        return f"unknown key; write {last} inside of the block {inner}"
    known = canonical_names(block)
    owners = [owner for owner in _owners(name) if owner != prefix + name]
    match = _nearest(name, known)
    others = [kind for kind, params in SCHEDULERS.items() if name in params.model_fields and params is not block]
    if block in SCHEDULERS.values() and others:
        return f"{block.__name__} does not have it ({others[0]} does); it has {', '.join(block.model_fields)}"
    if owners:
        return f"unknown key; did you mean {' or '.join(owners[:3])}?"
    if match:
        return f"unknown key; did you mean {prefix}{match}?"
    few = [one for one, field in block.model_fields.items() if key_of(field).status is not Status.REFUSED]
    listed = ", ".join(few) if len(few) <= 14 else "docs/deepspeed_config.md"
    return f"unknown key; remove it (known: {listed})"


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a mistyped one, or made of the same words in another order (`comm_overlap`)."""
    words = sorted(name.split("_"))
    return nearest(name, known) or next((one for one in known if sorted(one.split("_")) == words), None)


def _unlisted(name: Any, keys: tuple[str, ...]) -> str:
    match = nearest(str(name), keys)
    return f"unknown key; did you mean {match}?" if match else f"unknown key; known: {', '.join(keys)}"


def _owners(name: str, block: type[Block] = DeepSpeedConfig, prefix: str = "") -> list[str]:
    """Where in the file a key of this name belongs."""
    found = [prefix + name] if name in canonical_names(block) else []
    for field_name, field_info in block.model_fields.items():
        inner = block_of(field_info)
        if inner is not None:
            found += _owners(name, inner, f"{prefix}{field_name}.")
    if block is DeepSpeedConfig and name in AdamParams.model_fields:
        found.append(f"optimizer.params.{name}")
    return found


def _hint(value: Any) -> str:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return "; remove the quotes"
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return "; remove the quotes"
    return ""


def _is_comment(name: str) -> bool:
    # JSON has no comments, so people write them as keys
    return name.startswith(("_", "//", "#")) or name in ("comment", "comments")


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


def _has_nul(value: Any) -> bool:
    texts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(text, str) and "\0" in text for text in texts)
