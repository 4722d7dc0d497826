"""``compress`` and ``keep``: annotations of parts of a model, carried into the graph by torch.

Inside a compiled call, an annotation becomes ``node.meta["custom"]["commpass"]`` of every node made
under it, forward and backward. Outside one it has no graph to enter. The backend then reads
``open_scopes`` and raises an error rather than ignore it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.fx.traceback import annotate

from commpass.errors import PolicyError, nearest
from commpass.policy.paths import clean, names, remember, star
from commpass.policy.rules import Annotation, Rule
from commpass.utils.deprecated import renamed_argument
from commpass.utils.globs import covers
from commpass.utils.keywords import named_arguments

KEY = "commpass"
"""The key in ``node.meta["custom"]`` of the nearest enclosing annotation."""

_open: ContextVar[tuple[str, ...]] = ContextVar("commpass_open_scopes", default=())


def open_scopes() -> tuple[str, ...]:
    """Return the annotations of the scopes open around the caller, outside any compiled call; the
    nearest last."""
    return _open.get()


@contextmanager
def outside_scopes() -> Iterator[None]:
    """Close all scopes inside the context: code that runs there gets its annotation elsewhere."""
    token = _open.set(())
    try:
        yield
    finally:
        _open.reset(token)


class Scope:
    """An annotation for a part of a model: a decorator of a module class, a module or a function,
    or a context manager."""

    def __init__(self, annotation: Annotation):
        self.annotation = annotation
        self._tokens: list[Any] = []

    def __call__(self, target: Any) -> Any:
        if isinstance(target, type) and issubclass(target, nn.Module):
            target.forward = _under(self.annotation.to_json(), target.forward)
            return target
        if isinstance(target, nn.Module):
            _refuse_second_annotation(target, type(target).__name__)
            self._put_on(target)
            return target
        if callable(target):
            return _under(self.annotation.to_json(), target)
        raise PolicyError(
            f"compress and keep go on a module class, a module or a function, not on {target!r}"
        )

    def _put_on(self, target: nn.Module) -> None:
        for module in _callable(target):
            if _own_annotation(module) is None:  # otherwise the module's own annotation is nearer
                # A partial instead of a closure: a copy of the module, pickled or not, then has its
                # own forward and annotation.
                under = functools.partial(
                    _forward_under,
                    self.annotation.to_json(),
                    module,
                    module.__dict__.get("forward"),
                )
                module.forward = functools.update_wrapper(under, module.forward, updated=())

    def __enter__(self) -> Scope:
        self._tokens.append(_open.set((*_open.get(), self.annotation.to_json())))
        return self

    def __exit__(self, *error: object) -> None:
        _open.reset(self._tokens.pop())


def _own_annotation(module: nn.Module) -> str | None:
    """Return the annotation of this module instance, not of its class, or None."""
    forward = module.__dict__.get("forward")
    return (
        str(forward.args[0])
        if isinstance(forward, functools.partial) and forward.func is _forward_under
        else None
    )


def _refuse_second_annotation(module: nn.Module, name: str) -> None:
    """Raise PolicyError if an annotation of this module would have no effect, because all of it has
    annotations already."""
    known = [_own_annotation(part) for part in _callable(module)]
    if known and None not in known:
        raise PolicyError(
            f"{name} already has the annotation {known[0]}, and a second one would have no effect."
            " Put one annotation on a module, and all annotations of a model into one apply_policy"
        )


def _callable(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or the called modules inside a pure container such as a ModuleList."""
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        for child in module.children():
            yield from _callable(child)
    else:
        yield module


@named_arguments
def compress(
    target: Any = None,
    /,
    *,
    codec: Any = None,
    algorithm: Any = None,
    max_error: float | None = None,
    force: bool = False,
    lowering: str | None = None,
    chunks: int | None = None,
    rows: int | None = None,
) -> Any:
    """Say how the collectives of a part of the model may be compressed.

    Arguments that are not given come from the policy. ``compress`` without arguments applies the
    policy's own settings, regardless of its rules or an enclosing ``keep``.

    Use ``@commpass.compress`` or ``@commpass.compress(codec="int8")`` on a module class or
    function, ``with commpass.compress(...):`` inside compiled code, and
    ``commpass.compress(module)`` or ``commpass.compress(...)(module)`` on one module. The nearest
    enclosing annotation wins.

    Args:
        target: a module class, a function or a module. If None, return an annotation for one of
            them, or for ``with``.
        codec: one name or several.
        algorithm: one name or several.
        max_error: the allowed relative error.
        force: compress even if the cost model predicts no gain.
        lowering: ``inline``, ``kernel`` or ``single_kernel``.
        chunks: the number of chunks that a tensor is divided into.
        rows: the number of chunks of rows that the matmul before a collective is split into.

    Raises PolicyError for unknown names, and for positional arguments (``compress("int8")``).
    """
    if torch.compiler.is_dynamo_compiling():
        if target is not None:
            _refuse_inside(target)
        encoded = _compress_json(codec, algorithm, max_error, force, lowering, chunks, rows)
        return annotate({KEY: encoded})
    if target is not None:
        _refuse_unnamed(target)
    scope = Scope(_annotation(codec, algorithm, max_error, force, lowering, chunks, rows))
    return scope if target is None else scope(target)


@named_arguments
def keep(target: Any = None) -> Any:
    """Never compress here: ``@commpass.keep``, ``with commpass.keep():`` or
    ``commpass.keep(module)``.

    Args:
        target: a module class, a function or a module. If None, return an annotation for one of
            them, or for ``with``.
    """
    if torch.compiler.is_dynamo_compiling():
        return annotate({KEY: KEEP})
    scope = Scope(Annotation(keep=True))
    return scope if target is None else scope(target)


def _refuse_unnamed(value: Any) -> None:
    if not callable(value):
        write = f"compress(codec={value!r})" if isinstance(value, str) else 'compress(codec="int8")'
        raise PolicyError(f"compress({value!r}): arguments need their names, write {write}")


@torch.compiler.assume_constant_result
def _refuse_inside(value: Any) -> None:
    _refuse_unnamed(value)
    name = getattr(value, "__name__", type(value).__name__)
    raise PolicyError(
        f"compress({name}) inside compiled code: write `with commpass.compress():` around the call"
        " there, or @commpass.compress where it is defined"
    )


KEEP = Annotation(keep=True).to_json()


def _annotation(
    codec: Any,
    algorithm: Any,
    max_error: float | None,
    force: bool,
    lowering: str | None,
    chunks: int | None,
    rows: int | None,
) -> Annotation:
    return Annotation(
        codec=codec,
        algorithm=algorithm,
        max_error=max_error,
        force=force,
        lowering=lowering,
        chunks=chunks,
        rows=rows,
    )


@torch.compiler.assume_constant_result
def _compress_json(*fields: Any) -> str:
    return _annotation(*fields).to_json()


def _under(annotation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with annotate({KEY: annotation}):
                return function(*args, **kwargs)
        with _eagerly(annotation):
            return function(*args, **kwargs)

    wrapped.commpass_annotation = annotation  # type: ignore[attr-defined]
    return wrapped


def annotations_of(model: nn.Module) -> dict[str, str]:
    """Return the nearest annotation around each annotated module of a model, as JSON by path."""
    found: dict[str, str] = {}
    for path, module in names(model):  # outer ones first
        around = found.get(path) or found.get(path.rpartition(".")[0])
        own = getattr(type(module).forward, "commpass_annotation", None)
        nearest_annotation = own or _own_annotation(module) or around
        if nearest_annotation is not None:
            found[path] = nearest_annotation
    return found


def _forward_under(
    annotation: str,
    module: nn.Module,
    forward: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run one module under an annotation: ``forward``, or its class's method."""
    if torch.compiler.is_compiling():
        with annotate({KEY: annotation}):
            return (
                type(module).forward(module, *args, **kwargs)
                if forward is None
                else forward(*args, **kwargs)
            )
    with _eagerly(annotation):
        return (
            type(module).forward(module, *args, **kwargs)
            if forward is None
            else forward(*args, **kwargs)
        )


@contextmanager
def _eagerly(annotation: str) -> Iterator[None]:
    token = _open.set((*_open.get(), annotation))
    try:
        yield
    finally:
        _open.reset(token)


@renamed_argument("words", "annotations")
@named_arguments
def apply_policy(model: nn.Module, annotations: Mapping[str, Any]) -> nn.Module:
    """Annotate the submodules that match globs, without changes to the model's source.

        commpass.apply_policy(model, {"layers.0.mlp": commpass.keep(), "layers.*.mlp": "int8"})

    Return the model.

    Names are those of ``named_modules`` without wrapper attributes (torch.compile,
    checkpoint_wrapper, DDP, FSDP), as in rules. A tied module has several names, and an annotation
    of one applies to all.

    If several patterns match a module, the first one counts. An annotation in the module's source
    is nearer than any of them.

    Args:
        model: the model, whose submodules are annotated in place.
        annotations: by glob over module names, a codec, several codecs, a dict of ``compress``
            arguments, or a scope such as ``commpass.keep()``.

    Raises PolicyError for a pattern without a match (naming the nearest module), for an invalid
    value, and for an already annotated module. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise PolicyError(f"apply_policy(model={model!r}): must be a module, torch.nn.Module")
    if not isinstance(annotations, Mapping):
        write = '{"layers.*.mlp": "int8"}'
        raise PolicyError(
            f"apply_policy(annotations={annotations!r}): must map patterns to annotations: {write}"
        )
    known = {
        name: module for name, module in names(model) if name
    }  # a wrapper has the name of its module
    chosen: dict[nn.Module, tuple[str, Scope]] = {}
    for pattern, annotation in annotations.items():
        scope = _scope(pattern, annotation)
        found = [name for name in known if _is(pattern, name)]
        if not found:
            raise PolicyError(
                f"pattern {pattern!r} names no module of"
                f" {type(model).__name__}{_near(pattern, known)}"
            )
        for name in found:
            _refuse_second_annotation(known[name], name)
            chosen.setdefault(known[name], (name, scope))
    remember(model)
    inner_first = sorted(chosen.items(), key=lambda item: -item[1][0].count("."))
    for module, (_, scope) in inner_first:  # modules annotated last are further out
        scope._put_on(module)
    return model


def _is(pattern: str, name: str) -> bool:
    """Whether a glob matches this module itself, and not only one around it."""
    parent = name.rpartition(".")[0]
    return covers(pattern, name) and not (parent and covers(pattern, parent))


def _near(pattern: str, known: Mapping[str, nn.Module]) -> str:
    # Indices repeat in every layer, so the pattern is compared with module names that have stars
    # too. A star alone would not say what it stands for.
    if "*" not in pattern:
        return nearest(clean(pattern), known)
    top = {name for name in known if name.isdigit()}
    return nearest(clean(pattern), {star(name) for name in known} | top)


def _scope(pattern: Any, annotation: Any) -> Scope:
    """Return the scope for a pattern of ``apply_policy``, from any accepted form of value."""
    if not isinstance(pattern, str):
        raise PolicyError(f"apply_policy: pattern {pattern!r} must be a text, e.g. 'layers.*.mlp'")
    if isinstance(annotation, Scope):
        return annotation
    where = f"apply_policy: the annotation for {pattern!r}"
    if isinstance(annotation, Rule):
        raise PolicyError(
            f"{where} is {annotation}, whose module, kind, direction, group and min_bytes would be "
            "ignored here: put a rule into Policy(rules=[...]), or give a codec's name or "
            "commpass.compress(...) here"
        )
    if annotation is keep or (isinstance(annotation, str) and annotation == "keep"):
        raise PolicyError(f"{where} is {annotation!r}: write commpass.keep()")
    if annotation is compress:
        write = 'commpass.compress(), or commpass.compress(codec="int8")'
        raise PolicyError(f"{where} is {annotation!r}: write {write}")
    if not isinstance(annotation, (Annotation, Mapping, str, tuple, list)):
        raise PolicyError(
            f"{where} is {annotation!r}: must be a codec, a list of codecs, a dict of"
            " compress(...) "
            "arguments, commpass.compress(...) or commpass.keep()"
        )
    try:
        if isinstance(annotation, Annotation):
            return Scope(annotation)
        return Scope(
            Annotation(**annotation)
            if isinstance(annotation, Mapping)
            else Annotation(codec=annotation)
        )
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from error
