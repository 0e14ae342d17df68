"""Modules that must be gathered as a whole: DeepSpeed's `set_z3_leaf_modules` family.

Of a mixture of experts each token uses some experts only, so which of them run differs from rank to rank; gathered one
by one, ranks would wait for each other for ever. Here a group is never smaller than a layer, and a layer's experts lie
in one group, so the flag is needed only for a block inside which someone else's `_no_split_modules` names a part:
`leaf_modules_of` tells which modules may not be split further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from heavylift.errors import UserError
from heavylift.sharding import layers_of

_leaves: WeakIdKeyDictionary = WeakIdKeyDictionary()


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this very module is flagged."""
    return bool(_leaves.get(model, False))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Flags one module, or takes its flag away."""
    _leaves[model] = flag


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The flagged modules of `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Flags modules by class, or by the class's name, with or without its Python module. Returns those found.

    Raises UserError for anything that is no class or name, and (unless told otherwise) when nothing was found.
    """
    return _by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The inverse of `set_z3_leaf_modules`."""
    return _by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """By the names of `named_modules()`. Returns (modules, names that were not found)."""
    modules = dict(model.named_modules())
    found = [modules[name] for name in module_names if name in modules]
    return _flag(found, flag), _missing(model, module_names, lambda name: name in modules, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """By how their names end. Returns (modules, suffixes that were not found)."""
    modules = dict(model.named_modules())
    found = [m for name, m in modules.items() if name.endswith(tuple(module_name_suffixes))]
    is_there: Callable[[str], bool] = lambda suffix: any(name.endswith(suffix) for name in modules)  # noqa: E731
    return _flag(found, flag), _missing(model, module_name_suffixes, is_there, raise_if_not_found)


def leaf_modules_of(model: nn.Module) -> list[nn.Module]:
    """The outermost flagged modules: nothing inside of them is a group of its own."""
    inside: set[int] = set()
    outermost = []
    for module in model.modules():
        if id(module) in inside or not z3_leaf_module(module):
            continue
        outermost.append(module)
        inside.update(id(m) for m in module.modules())
    return outermost


def keep_leaves_whole(model: nn.Module, layers: list[nn.Module] | None) -> list[nn.Module] | None:
    """The layers that are gathered one by one, with those inside of a flagged module replaced by that module.

    None stands for the usual choice (`heavylift.sharding.shard_model`), and stays None without flagged modules.
    """
    leaf_of = {id(inner): leaf for leaf in leaf_modules_of(model) for inner in leaf.modules()}
    if not leaf_of:
        return layers
    chosen: dict[int, nn.Module] = {}
    for layer in layers_of(model) if layers is None else layers:
        whole = leaf_of.get(id(layer), layer)
        chosen[id(whole)] = whole
    return list(chosen.values())


def _flag(modules: list[nn.Module], flag: bool) -> list[nn.Module]:
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def _by_class(model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    for cls in classes:
        if not isinstance(cls, (type, str)):
            raise UserError(f"leaf_module_classes: expected classes or their names, got {type(cls).__name__}")
    names = {cls for cls in classes if isinstance(cls, str)}
    types = tuple(cls for cls in classes if isinstance(cls, type))

    def matches(module: nn.Module) -> bool:
        own = type(module)
        return isinstance(module, types) or own.__name__ in names or f"{own.__module__}.{own.__qualname__}" in names

    found = [module for module in model.modules() if matches(module)]
    if not found and raise_if_not_found:
        shown = ", ".join(cls if isinstance(cls, str) else cls.__name__ for cls in classes)
        raise UserError(f"leaf_module_classes: {type(model).__name__} has no module of {shown}")
    return _flag(found, flag)


def _missing(
    model: nn.Module, names: Sequence[str], is_there: Callable[[str], bool], raise_if_not_found: bool
) -> list[str]:
    missing = [name for name in names if not is_there(name)]
    if missing and raise_if_not_found:
        raise UserError(f"leaf modules: {type(model).__name__} has none named {', '.join(missing)}")
    return missing
