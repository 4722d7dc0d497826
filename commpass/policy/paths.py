"""The path of a module as its user writes it: the name in the root model, without what wrappers put
into it.

Names come in three forms: those of ``named_modules``, the sources that Dynamo writes down
(``L['self'].layers.0``), and module objects. ``clean`` and ``names`` are the one place that knows
what in a name belongs to a wrapper.
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
"""The attributes in which torch.compile, checkpoint_wrapper and FSDP keep the module that they
wrap."""
PLUMBING = re.compile(r"\.forward\.args\.1(?=\.|$)|\.(?:__dict__|_modules)(?=\.|$)")
"""What Dynamo writes of how it came from a module to one inside: through a word's ``forward``, or a
dictionary."""


def clean(path: str, parallel: Iterable[str] = ()) -> str:
    """``L['self'].layers.0._orig_mod.mlp`` and its relatives to ``layers.0.mlp``.

    ``parallel`` are the paths, as raw as ``path``, of those modules whose ``module`` is what they
    wrap.
    """
    parts = _parts(_strip_wrappers(parallel, path))
    if parts and parts[0] in ("L", "G"):
        parts = parts[2:]
    elif parts and parts[0] in ("self", "L__self__"):
        parts = parts[1:]
    return ".".join(parts)


def _strip_wrappers(parallel: Iterable[str], path: str) -> str:
    """A path without the ``module`` of the wrappers at ``parallel``."""
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
    """Whether a class is a wrapper that calls what it wraps ``module``, as a module of the user's
    own might be called."""
    return isinstance(kind, type) and issubclass(kind, (DistributedDataParallel, DataParallel))


def names(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every (path, module) of a model, outer ones first. A module that is tied has several paths; a
    wrapper has that of what it wraps."""
    found = list(model.named_modules(remove_duplicate=False))
    parallel = [name for name, module in found if is_parallel(type(module))]
    return [(_of_names(_strip_wrappers(parallel, name)), module) for name, module in found]


def _of_names(path: str) -> str:
    """A name of ``named_modules`` without wrappers. A name in it may be anything that has no dot:
    also ``G``, ``self``, or what Dynamo would write in a source."""
    return ".".join(name for name in path.split(".") if name and name not in WRAPPERS)


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def common(paths: Iterable[str]) -> str:
    """The innermost module that all of some paths are in, or are: ``layers`` of ``layers.0.norm``
    and ``layers.1``; "" is the root."""
    columns = zip(*(path.split(".") for path in paths), strict=False)
    alike = itertools.takewhile(lambda names: len(set(names)) == 1, columns)
    return ".".join(names[0] for names in alike)


_known: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def remember(model: nn.Module) -> None:
    """Keeps where the modules of a model stand in it, for when one is compiled and called by
    itself."""
    for path, module in names(model):
        _known.setdefault(module, path)


# --- where a graph of Dynamo's stands in the model around it --------------------------------------


class Places:
    """Paths in the root model of the modules in the graph that Dynamo is compiling now.

    The root is the outermost module whose call is going on and that holds what is compiled:
    model(x) calls its blocks, and they are compiled one by one. Where no call goes on around it, it
    is the compiled module itself, or the model that ``apply_policy`` saw it in.

    Blocks of a class that are compiled one by one share one graph. Where only numbers tell their
    paths apart, it stands for all of them: ``layers.*``.
    """

    def __init__(self) -> None:
        self.scope = _scope()
        self.around = list(_modules_around())
        self.tables: dict[int, dict[int, list[str]]] = {}
        self.found: dict[int, str] = {}
        self.kept: list[nn.Module] = []  # since the number of one that is gone is used again

    def path(self, stack: Mapping[str, tuple[str, Any]] | None) -> str | None:
        """The path that a node's module stack leads to, or that of the compiled code where there is
        none; None where it cannot be known."""
        if not stack:
            return self._of(self.around[-1]) if self.around else None
        key, (source, _) = list(stack.items())[-1]
        base, inside = self._follow(source)
        if base is None:
            return None
        paths = self._table(base).get(_identity(key), [inside])
        return join(self._of(base), inside if inside in paths else paths[0])

    def _of(self, module: nn.Module) -> str:
        """Where a module that is compiled by itself stands, with a star for each number that does
        not count."""
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
        """The first module on the way that a source names, and the rest of the way."""
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
    """``layers.3.mlp`` to ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _identity(key: str) -> int:
    """The id of a module that Dynamo's stack names by it; ``@n`` counts its calls."""
    number = key.partition("@")[0]
    return int(number) if number.isdecimal() else -1


def _entry(value: Any, name: str) -> Any:
    if isinstance(value, (list, tuple)) and name.isdecimal():
        return value[int(name)] if int(name) < len(value) else None
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _scope() -> dict[str, dict[str, Any]]:
    """The local and global names of the code that Dynamo is compiling."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator: Any = InstructionTranslator.current_tx()
        return {"L": translator.f_locals, "G": translator.f_globals}
    except AttributeError:  # nothing is being compiled here
        return {"L": {}, "G": {}}


def _modules_around() -> Iterator[nn.Module]:
    """The modules whose calls are going on, the outermost first."""
    frame: FrameType | None = sys._getframe()
    found = []
    while frame is not None:
        code = frame.f_code
        value = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(value, nn.Module) and not isinstance(value, fx.GraphModule):
            found.append(value)
        frame = frame.f_back
    return reversed(found)
