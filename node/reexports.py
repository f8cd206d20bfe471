"""Packages whose `__init__` does nothing but import names from their modules, loaded a name at a time.

`from hivemind.dht.node import DHTNode` runs `hivemind/__init__.py` first, and that imports all of hivemind: its
averaging, its experts, its optimizers, and for them torch and scipy: 2 s of CPU time and 240 MB in a daemon that needs
the DHT alone. What PEP 562 lets a package do for itself is done for it here: each name that its `__init__` would have
imported is imported, from the module that the `__init__` names, when it is first asked for. Every module that is loaded
is the real one, run in full; names that nobody asks for stay unloaded.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

Exports = dict[str, tuple[str, str]]
_lock = threading.Lock()


class _Package(ModuleType):
    """A package that imports the names it re-exports when asked for them."""

    def __init__(self, spec: ModuleSpec, exports: Exports, constants: dict[str, object]) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__package__ = spec.name
        self.__dict__.update(constants)
        self._exports = exports

    def __getattr__(self, name: str) -> object:
        """Called for what is not there yet."""
        if name not in self._exports:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, there = self._exports[name]
        value = getattr(importlib.import_module(module), there)
        setattr(self, name, value)
        return value


def defer(packages: Sequence[str]) -> None:
    """Makes these packages, parents first, import what they re-export when it is asked for.

    A package that is imported already, or whose `__init__` does anything else, is left to the ordinary import, and so
    are those after it.
    """
    with _lock:
        for name in packages:
            if name in sys.modules:
                if isinstance(sys.modules[name], _Package):
                    continue
                return
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                return
            read = reexports(Path(spec.origin).read_text(encoding="utf-8"))
            if read is None:
                return
            package = sys.modules[name] = _Package(spec, *read)
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], own, package)


def reexports(source: str) -> tuple[Exports, dict[str, object]] | None:
    """What an `__init__` re-exports, {name: (module, name there)}, and its constants (`__version__ = "1.0"`).

    None when it does more than that.
    """
    found: Exports = {}
    constants: dict[str, object] = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.ImportFrom(module=str(module), names=names, level=0) if all(each.name != "*" for each in names):
                found |= {each.asname or each.name: (module, each.name) for each in names}
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                constants[name] = value
            case _:
                return None
    return found, constants
