"""``deepspeed.utils.z3_leaf_module``: flags on modules that are gathered as one.

Nothing here depends on them: units may run in any order, and in part (mixtures of experts). They
are kept, so that a program reads what it has set.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

_flagged: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module has the flag."""
    return model in _flagged


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether this parameter belongs to a module with the flag."""
    return any(model is one for module in _flagged for one in module.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` with the flag."""
    return [module for module in model.modules() if module in _flagged]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Give this module the flag, or take it."""
    (_flagged.add if flag else _flagged.discard)(model)
    vars(model)["_z3_leaf"] = flag  # programs read DeepSpeed's own attribute


def _set(
    found: Iterable[nn.Module], flag: bool, missing: object, model: nn.Module, raises: bool
) -> list[nn.Module]:
    """Set the flag of each. Raises ValueError where something is `missing` and that `raises`."""
    if missing and raises:
        raise ValueError(f"{type(model).__name__} has no module of {missing}")
    modules = list({id(one): one for one in found}.values())
    for one in modules:
        set_z3_leaf_module(one, flag)
    return modules


def _is_of(module: nn.Module, kind: type | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    name = type(module)
    return kind in (name.__name__, f"{name.__module__}.{name.__qualname__}")


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type | str], raise_if_not_found: bool = True,
    flag: bool = True,
) -> list[nn.Module]:  # fmt: skip
    """Flag the modules of these classes (or names of classes) and return them. Raises ValueError
    where there are none.
    """
    found = [
        one for one in model.modules() if any(_is_of(one, kind) for kind in leaf_module_classes)
    ]
    missing = [] if found else leaf_module_classes
    return _set(found, flag, missing, model, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the flag off the modules of these classes and return them."""
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found, flag=False)


def _by_name(
    model: nn.Module, names: list[str], fits: Callable[[str, str], bool], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    missing = [one for one in names if not any(fits(name, one) for name in modules)]
    found = [modules[name] for one in names for name in modules if fits(name, one)]
    return _set(found, flag, missing, model, raises), missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Flag the modules of these names; return them and the names that there are not. Raises
    ValueError for such.
    """
    return _by_name(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: list[str], flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:  # fmt: skip
    """The same of modules whose names end so."""
    return _by_name(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def flag_configured(model: nn.Module, section: dict[str, Any]) -> None:
    """Flag the modules that the configuration's ``zero_optimization.leaf_module`` names."""
    setters: dict[str, Any] = {
        "classes": set_z3_leaf_modules,
        "names": set_z3_leaf_modules_by_name,
        "name_suffixes": set_z3_leaf_modules_by_suffix,
    }
    for key, put in setters.items():
        wanted = section.get(key)
        if isinstance(wanted, list):  # no key that changes nothing is refused for its value
            names = [one for one in wanted if isinstance(one, str)]
            put(model, names, raise_if_not_found=False)
