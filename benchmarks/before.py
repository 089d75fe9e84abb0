"""The kernels of another checkout, such as `git worktree add ../before REV` makes, to be timed beside those here."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from pallas_kernels import BlockAttention, Mask, Operand

PACKAGE = "pallas_kernels"
SUFFIX = "_before"


def load(folder: Path, names: Iterable[str]) -> dict[str, BlockAttention]:
    """Its implementations of these names, by their names with SUFFIX.

    Raises:
        ValueError: the folder has no kernels, or none of such a name.
    """
    if not (folder / PACKAGE / "__init__.py").exists():
        raise ValueError(f"{folder}: must be a checkout with {PACKAGE}/")
    package = _import(folder)
    names = list(names)
    for name in names:
        if name not in package.IMPLEMENTATIONS:
            raise ValueError(f"{folder}: has no implementation {name!r}, only {sorted(package.IMPLEMENTATIONS)}")

    def translated(function: Callable[..., Any]) -> Callable[..., Any]:
        def operand(x: Operand) -> Any:
            return package.Operand(x.own, package.Box(*x.box), x.peer, x.is_peer)

        def mask(x: Mask) -> Any:
            return package.Mask(**{field.name: getattr(x, field.name) for field in dataclasses.fields(package.Mask)})

        return lambda queries, keys, seen, *others, **options: function(
            operand(queries), operand(keys), mask(seen), *others, **options
        )

    return {
        name + SUFFIX: BlockAttention(translated(kernel.forward), translated(kernel.backward))
        for name, kernel in ((name, package.IMPLEMENTATIONS[name]) for name in names)
    }


def _import(folder: Path) -> ModuleType:
    """The package there, beside that which is imported already under the same name."""
    is_own = lambda name: name.partition(".")[0] == PACKAGE
    present = {name: sys.modules.pop(name) for name in list(filter(is_own, sys.modules))}
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(PACKAGE)
    finally:
        sys.path.remove(str(folder))
        for name in list(filter(is_own, sys.modules)):
            del sys.modules[name]
        sys.modules.update(present)
