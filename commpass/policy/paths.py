"""Module paths as users write them: names in the root model, without the attributes that wrappers
add.

Names come in three forms: those of ``named_modules``, the sources that Dynamo records
(``L['self'].layers.0``), and module objects. Only ``clean`` and ``names`` know which parts of a
name belong to wrappers.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The attributes in which torch.compile, checkpoint_wrapper and FSDP store the module that they
wrap."""
PLUMBING = re.compile(r"\.forward\.args\.1(?=\.|$)|\.(?:__dict__|_modules)(?=\.|$)")
"""The parts of Dynamo's sources that lead from a module to an inner one: through an annotation's
``forward``, or a dictionary."""


def clean(path: str, parallel: Iterable[str] = ()) -> str:
    """Convert ``L['self'].layers.0._orig_mod.mlp`` and similar sources to ``layers.0.mlp``.

    ``parallel`` are the paths, as raw as ``path``, of the wrappers whose ``module`` is the wrapped
    module.
    """
    parts = _parts(_strip_wrappers(parallel, path))
    if parts and parts[0] in ("L", "G"):
        parts = parts[2:]
    elif parts and parts[0] in ("self", "L__self__"):
        parts = parts[1:]
    return ".".join(parts)


def _strip_wrappers(parallel: Iterable[str], path: str) -> str:
    """Return a path without the ``module`` attribute of the wrappers at ``parallel``."""
    for wrapper in sorted(parallel, key=len, reverse=True):
        inner = f"{wrapper}.module" if wrapper else "module"
        if path == inner or path.startswith(inner + "."):
            path = wrapper + path[len(inner) :]
    return path


def _parts(path: str) -> list[str]:
    path = re.sub(r"getattr\((.*?), '?\"?(\w+)'?\"?\)", r"\1.\2", path)
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    return [part for part in PLUMBING.sub("", path).split(".") if part and part not in WRAPPERS]


def is_parallel(kind: Any) -> bool:
    """Whether a class is a wrapper that stores its module in ``module``, a name that a user's
    module may have as well."""
    return isinstance(kind, type) and issubclass(kind, (DistributedDataParallel, DataParallel))


def names(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every (path, module) of a model, outer ones first. A tied module has several paths; a
    wrapper has the path of its module."""
    found = list(model.named_modules(remove_duplicate=False))
    parallel = [name for name, module in found if is_parallel(type(module))]
    return [(_of_names(_strip_wrappers(parallel, name)), module) for name, module in found]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside a model's wrappers: the model itself if it is no wrapper."""
    return [module for path, module in names(model) if not path][-1]


def _of_names(path: str) -> str:
    """Return a name of ``named_modules`` without wrappers. Its parts may be any text without a dot,
    including ``G``, ``self`` and the syntax of Dynamo's sources."""
    return ".".join(name for name in path.split(".") if name and name not in WRAPPERS)


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def common(paths: Iterable[str]) -> str:
    """Return the innermost module that contains or is all of some paths: ``layers`` for
    ``layers.0.norm`` and ``layers.1``. "" is the root."""
    columns = zip(*(path.split(".") for path in paths), strict=False)
    alike = itertools.takewhile(lambda names: len(set(names)) == 1, columns)
    return ".".join(names[0] for names in alike)


_known: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def remember(model: nn.Module) -> None:
    """Record the paths of a model's modules, for those that are later compiled and called on their
    own."""
    for path, module in names(model):
        _known.setdefault(module, path)


# --- the place of a Dynamo graph in its model -----------------------------------------------------


class ModulePaths:
    """Paths in the root model of the modules in the graph that Dynamo is compiling.

    The root is the outermost running module that contains the compiled one: model(x) calls its
    blocks, which are compiled one by one. If no such call is running, it is the compiled module
    itself, or the model that ``apply_policy`` saw it in.

    Separately compiled blocks of one class share a graph. If their paths differ only in numbers,
    the path stands for all of them: ``layers.*``.
    """

    def __init__(self) -> None:
        self.scope = _scope()
        self.around = list(_modules_around())
        self.tables: dict[int, dict[int, list[str]]] = {}
        self.found: dict[int, str] = {}
        self.kept: list[nn.Module] = []  # keeps them alive, because ids of freed modules are reused

    def path(self, stack: Mapping[str, tuple[str, Any]] | None) -> str | None:
        """Return the path of a node's module stack, or that of the compiled code without a stack;
        None if it cannot be known."""
        if not stack:
            return self._of(self.around[-1]) if self.around else None
        key, (source, _) = list(stack.items())[-1]
        base, inside = self._follow(source)
        if base is None:
            return None
        paths = self._table(base).get(_identity(key), [inside])
        return join(self._of(base), inside if inside in paths else paths[0])

    def _of(self, module: nn.Module) -> str:
        """Return the path of a separately compiled module, with a star for each number that is
        irrelevant."""
        if id(module) not in self.found:
            self.kept.append(module)
            self.found[id(module)] = self._find(module)
        return self.found[id(module)]

    def _find(self, module: nn.Module) -> str:
        root = next((one for one in self.around if id(module) in self._table(one)), module)
        path = self._table(root)[id(module)][0]
        if not path:
            return _known.get(module, "")
        starred = star(path)
        like = (name for name, other in names(root) if type(other) is type(module) and name != path)
        return starred if any(star(name) == starred for name in like) else path

    def _table(self, root: nn.Module) -> dict[int, list[str]]:
        if id(root) not in self.tables:
            table = self.tables[id(root)] = {}
            for path, module in names(root):
                self.kept.append(module)
                table.setdefault(id(module), []).append(path)
        return self.tables[id(root)]

    def _follow(self, source: str) -> tuple[nn.Module | None, str]:
        """Return the first module that a source names, and the rest of the source."""
        parts = _parts(source)
        value = (
            self.scope[parts[0]].get(parts[1])
            if len(parts) > 1 and parts[0] in self.scope
            else None
        )
        rest = parts[2:]
        while rest and not isinstance(value, nn.Module):
            value, rest = _entry(value, rest[0]), rest[1:]
        return (value, ".".join(rest)) if isinstance(value, nn.Module) else (None, "")


def star(path: str) -> str:
    """Convert ``layers.3.mlp`` to ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _identity(key: str) -> int:
    """Return the id of a module from its key in Dynamo's stack; ``@n`` counts its calls."""
    number = key.partition("@")[0]
    return int(number) if number.isdecimal() else -1


def _entry(value: Any, name: str) -> Any:
    if isinstance(value, (list, tuple)) and name.isdecimal():
        return value[int(name)] if int(name) < len(value) else None
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _scope() -> dict[str, dict[str, Any]]:
    """Return the local and global names of the code that Dynamo is compiling."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator: Any = InstructionTranslator.current_tx()
        return {"L": translator.f_locals, "G": translator.f_globals}
    except AttributeError:  # nothing is being compiled
        return {"L": {}, "G": {}}


def _modules_around() -> Iterator[nn.Module]:
    """Return the modules whose calls are running, the outermost first."""
    frame: FrameType | None = sys._getframe()
    found = []
    while frame is not None:
        code = frame.f_code
        value = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(value, nn.Module) and not isinstance(value, fx.GraphModule):
            found.append(value)
        frame = frame.f_back
    return reversed(found)
