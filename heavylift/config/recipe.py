"""Reads a recipe (YAML and `section.key=value` overrides) into the typed `Recipe`, and writes it back.

Every problem of the file and of the command line is collected and raised as one `UserError`, each with its line
number. YAML is read more plainly than PyYAML does by default: `1e-5` is a number, `2026-01-31` and `010` are not
dates or octal numbers. Left out: whether files and folders exist (see `heavylift.train.preflight`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from heavylift.config.conflict import Conflict
from heavylift.config.schema import Recipe
from heavylift.config.words import accepts, expected, named, nearest, sections, shown
from heavylift.errors import UserError

COMMAND_LINE = "command line"


@dataclass
class _Given:
    """What file and command line gave, with the place of each value for messages."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def place(self, *loc: str) -> str:
        for depth in range(len(loc), -1, -1):
            if loc[:depth] in self.places:
                return self.places[loc[:depth]]
        return COMMAND_LINE


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Parse the YAML file and apply the overrides in order (a later one wins).

    Raises UserError with one message per problem, `FILE:LINE: section.key: expected ..., got ...`; for overrides
    `command line` stands in place of file and line.
    """
    given = _Given()
    _read_file(Path(path), str(path), given)
    for override in overrides:
        _read_override(override, given)
    try:
        recipe = Recipe.model_validate(_without_stray_bools(given.values))
    except ValidationError as error:
        given.problems += _explain(error, given)
    else:
        given.problems += _unusable_texts(recipe, given)
    if given.problems:
        raise UserError(*sorted(given.problems, key=lambda problem: _line_of(problem, str(path))))
    return recipe


_DS_CONFIG_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"}


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe, defaults included, as YAML that `load_recipe` reads back to an equal one."""
    return dump_yaml(recipe.model_dump(mode="json"))


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML of sections, keys in their order, whose texts `load_recipe` reads back as they are."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _read_file(path: Path, shown_path: str, given: _Given) -> None:
    text = _read_text(path, shown_path)
    loader = _open_loader(text, shown_path)
    try:
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise UserError(_syntax_problem(error, shown_path)) from None
    except RecursionError:
        raise UserError(f"{shown_path}: nested too deeply; expected sections of `key: value` lines") from None
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == "tag:yaml.org,2002:null"):
        raise UserError(f"{shown_path}: empty recipe; expected the sections model, data and train")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{shown_path}:{_line(root)}: expected sections such as `model:`, got {_kind(root)}")
    given.places[()] = shown_path
    _refuse_ds_config(root, shown_path)
    for name, key_node, value_node in _pairs(loader, root, shown_path, "", given):
        place = f"{shown_path}:{_line(key_node)}"
        if name not in sections():
            given.problems.append(f"{place}: {named(name)}: {_unknown_section(name)}")
            continue
        given.places[(name,)] = place
        _read_section(loader, name, value_node, shown_path, given)


def _refuse_ds_config(root: yaml.MappingNode, shown_path: str) -> None:
    """JSON is YAML too: one line for the file, instead of one for each of its keys."""
    names = {key.value for key, _ in root.value if isinstance(key, yaml.ScalarNode)}
    if names & _DS_CONFIG_KEYS and not names & sections().keys():
        raise UserError(
            f"{shown_path}: expected a recipe, got a ds_config.json; a script of yours reads it (heavylift launch), or "
            f"write the recipe: heavylift config convert {shown_path} --model M --dataset D -o recipe.yaml"
        )


def _read_text(path: Path, shown_path: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{shown_path}: no such file; give the path of a recipe (YAML)") from None
    except IsADirectoryError:
        raise UserError(f"{shown_path}: expected a recipe (YAML file), got a folder") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{shown_path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise UserError(f"{shown_path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _open_loader(text: str, shown_path: str) -> _Loader:
    try:
        return _Loader(text)
    except yaml.YAMLError as error:  # control characters are refused here
        raise UserError(_syntax_problem(error, shown_path)) from None


def _read_section(loader: _Loader, section: str, node: yaml.Node, shown_path: str, given: _Given) -> None:
    fields = sections()[section].model_fields
    values = given.values.setdefault(section, {})
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return  # a section whose keys are all commented out
    if not isinstance(node, yaml.MappingNode):
        place = f"{shown_path}:{_line(node)}"
        given.problems.append(
            f"{place}: {section}: expected keys such as `{next(iter(fields))}: ...`, got {_kind(node)}"
        )
        return
    for key, key_node, value_node in _pairs(loader, node, shown_path, f"{section}.", given):
        place = f"{shown_path}:{_line(key_node)}"
        if key not in fields:
            given.problems.append(f"{place}: {section}.{named(key)}: {_unknown_key(section, key)}")
            continue
        given.places[(section, key)] = place
        try:
            values[key] = loader.construct_object(value_node, deep=True)
        except yaml.YAMLError as error:
            given.problems.append(_syntax_problem(error, shown_path))
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError):
            # an explicit tag that the text does not fit, e.g. `!!int abc`
            given.problems.append(
                f"{place}: {section}.{key}: expected {expected(fields[key])}, got {_kind(value_node)}"
            )


def _pairs(
    loader: _Loader, node: yaml.MappingNode, shown_path: str, prefix: str, given: _Given
) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Key, key node and value node of each entry; merge keys (`<<`) resolved, duplicates and odd keys reported."""
    seen: dict[str, int] = {}
    own = [key for key, _ in node.value]
    try:
        loader.flatten_mapping(node)
    except yaml.YAMLError as error:
        given.problems.append(_syntax_problem(error, shown_path))
        return
    for key_node, value_node in node.value:
        place = f"{shown_path}:{_line(key_node)}"
        if not isinstance(key_node, yaml.ScalarNode):
            given.problems.append(f"{place}: expected a name before the colon, got {_kind(key_node)}")
            continue
        name = key_node.value
        if name in seen and any(key is key_node for key in own):
            given.problems.append(
                f"{place}: {prefix}{named(name)}: given twice (first in line {seen[name]}); remove one"
            )
        if any(key is key_node for key in own):
            seen[name] = _line(key_node)
        yield name, key_node, value_node


def _read_override(override: str, given: _Given) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals:
        given.problems.append(f"{COMMAND_LINE}: expected section.key=value, got {shown(override)}")
        return
    if section not in sections():
        given.problems.append(f"{COMMAND_LINE}: {named(name)}: {_unknown_section(section, key)}")
        return
    fields = sections()[section].model_fields
    if not dot or key not in fields:
        hint = _unknown_key(section, key) if dot else f"expected a key of this section: {', '.join(fields)}"
        given.problems.append(f"{COMMAND_LINE}: {named(name)}: {hint}")
        return
    try:
        value = yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError):
        value = text
    if accepts(fields[key], str) and not isinstance(value, list | NoneType):
        value = text  # `eval.sample_prompt=Why: because?` and `train.output_dir=2026` are texts, whatever YAML thinks
    given.places[(section, key)] = COMMAND_LINE
    given.values.setdefault(section, {})[key] = value


def _unknown_section(name: str, key: str = "") -> str:
    owners = [section for section, model in sections().items() if (key or name) in model.model_fields]
    if owners:
        return f"unknown section; did you mean {' or '.join(f'{owner}.{key or name}' for owner in owners)}?"
    match = nearest(name, sections())
    if match:
        return f"unknown section; did you mean {match}{'.' + named(key) if key else ''}?"
    return f"unknown section; known: {', '.join(sections())}"


def _unknown_key(section: str, key: str) -> str:
    owners = [name for name, model in sections().items() if key in model.model_fields]
    if owners:
        return f"unknown key; did you mean {' or '.join(f'{owner}.{key}' for owner in owners)}?"
    match = nearest(key, sections()[section].model_fields)
    if match:
        return f"unknown key; did you mean {section}.{match}?"
    everywhere = {name: owner for owner, model in sections().items() for name in model.model_fields}
    match = nearest(key, everywhere)
    if match:
        return f"unknown key; did you mean {everywhere[match]}.{match}?"
    return f"unknown key; known: {', '.join(sections()[section].model_fields)}"


def _without_stray_bools(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """All sections, where true/false for a key that takes neither is turned into a word that pydantic refuses:
    Python's True equals 1, so `zero_stage: yes` would pass as stage 1."""
    checked: dict[str, dict[str, Any]] = {}
    for name, model in sections().items():
        given = values.get(name, {})
        checked[name] = {
            key: shown(value) if isinstance(value, bool) and not _takes_bool_or_text(model.model_fields[key]) else value
            for key, value in given.items()
        }
    return checked


def _takes_bool_or_text(field_info: FieldInfo) -> bool:
    return accepts(field_info, bool) or accepts(field_info, str)


def _unusable_texts(recipe: Recipe, given: _Given) -> list[str]:
    """No path or prompt may hold a NUL character: the file system refuses it with an obscure error."""
    return [
        f"{given.place(section, key)}: {section}.{key}: expected text without NUL characters"
        for section, values in recipe.model_dump(mode="json").items()
        for key, value in values.items()
        if any(isinstance(text, str) and "\0" in text for text in (value if isinstance(value, list) else [value]))
    ]


def _line_of(problem: str, shown_path: str) -> float:
    """Line number in a message, for sorting; what has none (the command line) comes last."""
    match = re.match(r":(\d+):", problem.removeprefix(shown_path)) if problem.startswith(shown_path) else None
    return int(match.group(1)) if match else float("inf")


def _explain(error: ValidationError, given: _Given) -> list[str]:
    """Pydantic's errors in plain words, one per key (a union type reports each of its branches)."""
    found: dict[tuple[str, ...], str] = {}
    for item in error.errors(include_url=False, include_context=True):
        loc = tuple(str(part) for part in item["loc"][:2])
        if loc in found:
            continue
        conflict = item.get("ctx", {}).get("error")
        if isinstance(conflict, Conflict):
            keys = [(*loc, *key.split(".")) for key in conflict.keys]
            found[loc] = _told(keys, str(conflict), given)
            continue
        assert len(loc) == 2, f"a check that does not say which keys it is about: {item}"
        name, place = ".".join(loc), given.place(*loc)
        section, key = loc
        takes = expected(sections()[section].model_fields[key])
        if item["type"] == "missing":
            found[loc] = f"{place}: {name}: missing; expected {takes}"
            continue
        value = given.values[section][key]
        hint = "; put it in quotes" if takes.startswith("text") and isinstance(value, int | float) else ""
        found[loc] = f"{place}: {name}: expected {takes}, got {shown(value)}{hint}"
    return list(found.values())


def _told(keys: Sequence[tuple[str, ...]], message: str, given: _Given) -> str:
    """A conflict, at the key that came last: one of the command line, which changes what the file says."""
    named = [key for key in keys if key in given.places]
    key = next((key for key in named if given.place(*key) == COMMAND_LINE), (named or keys)[0])
    return f"{given.place(*key)}: {'.'.join(key)}: {message}"


def _syntax_problem(error: yaml.YAMLError, shown_path: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
    where = f"{shown_path}:{mark.line + 1}:{mark.column + 1}" if mark else shown_path
    return f"{where}: not valid YAML: {' '.join(str(what).split())}; check colons, quotes and indentation there"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return shown(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers of YAML 1.2: no dates, no octal, no base 60, but 1e-5."""


_REPLACED = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what PyYAML's own loader or ours would read as something other than text."""


def _text_node(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # to YAML these end a line as "\n" does, and PyYAML would write them as they are and read them back as blanks
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)

for _first, _resolvers in _Loader.yaml_implicit_resolvers.items():
    _Dumper.yaml_implicit_resolvers = {
        **_Dumper.yaml_implicit_resolvers,
        _first: _Dumper.yaml_implicit_resolvers.get(_first, []) + [r for r in _resolvers if r[0] in _REPLACED],
    }
