"""Encode, decode and sum as opaque operators, for algorithms that need not know their
implementation.

While an algorithm is traced under ``as_operators``, each of the functions below becomes one node;
``IMPLEMENTATIONS`` maps it to its implementation. Otherwise they compute directly, so a function
that the user compiles contains plain operators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import constants
from commpass.codecs.block.domain import VALUES, Domain
from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.raw import RawCodec
from commpass.codecs.registry import codec as codec_of
from commpass.codecs.sparse import SparseCodec, sum_by_index
from commpass.utils.ambient import ambient_free

ops = torch.ops.commpass

UNROLLED_RANKS = 16
"""Up to this many ranks a sum is a chain of additions that fuses into one kernel; above it, one
reduction."""

_opaque: ContextVar[bool] = ContextVar("as_operators", default=False)


@contextmanager
def as_operators() -> Iterator[None]:
    """Trace encode, decode and sums as single operators in this context."""
    before = _opaque.set(True)
    try:
        yield
    finally:
        _opaque.reset(before)


def encode(codec: Codec, rows: Tensor, salt: Sequence[int] = ()) -> Tensor:
    """Encode ``[rows, n]`` to uint8 ``[rows, wire_bytes(n)]``; ``salt`` as in ``Codec.salted``."""
    if _is_plain(codec):
        return codec.salted(*salt).encode_rows(rows)
    return ops.encode(rows, _name(codec), list(salt), *_tables(codec, rows))


def encode_with_feedback(
    codec: Codec, rows: Tensor, residual: Tensor, salt: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Encode ``rows + residual`` in the dtype of ``rows``, and return the wire and the new residual
    (error feedback).

    The new residual is the encoding error, ``[rows, n]`` in the dtype of ``residual``. It is 0 if
    the input or the decoded value is not finite, since nonfinite values must not persist.
    """
    if not _opaque.get():
        return _with_feedback(codec.salted(*salt), rows, residual)
    wire, error = ops.encode_with_feedback(rows, residual, _name(codec), list(salt))
    return wire, error


def encode_parts(codec: Codec, rows: Tensor, salt: Sequence[int] = ()) -> tuple[Tensor, ...]:
    """As ``encode``, with separate parts of the wire: uint8 ``[rows, parts(n)[i]]`` each."""
    if _is_plain(codec):
        return codec.salted(*salt).encode_parts(rows)
    return tuple(ops.encode_parts(rows, _name(codec), list(salt), *_tables(codec, rows)))


def decode(codec: Codec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Decode a wire of ``encode`` to ``[rows, numel]``, as ``Codec.decode_rows``."""
    if _is_plain(codec):
        return codec.decode_rows(wire, numel, dtype)
    return ops.decode(wire, _name(codec), numel, dtype, *_tables(codec, wire))


def decode_parts(codec: Codec, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
    """As ``decode``, from separate parts."""
    if _is_plain(codec):
        return codec.decode_parts(parts, numel, dtype)
    return ops.decode_parts(list(parts), _name(codec), numel, dtype, *_tables(codec, parts[0]))


def used_bytes(codec: Codec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """As ``Codec.used_bytes``: int64 ``[rows]``."""
    if _is_plain(codec):
        return codec.used_bytes(wire, numel, dtype)
    return ops.used_bytes(wire, _name(codec), numel, dtype)


def to_domain(domain: Domain, rows: Tensor) -> Tensor:
    """Transform rows of values to a domain."""
    if domain == VALUES or not _opaque.get():
        return domain.to_domain(rows)
    return ops.enter(rows, _register(str(domain.transform), domain))


def from_domain(domain: Domain, rows: Tensor) -> Tensor:
    """The inverse of ``to_domain``."""
    if domain == VALUES or not _opaque.get():
        return domain.from_domain(rows)
    return ops.leave(rows, _register(str(domain.transform), domain))


def sum_rows(rows: Tensor) -> Tensor:
    """Sum ``[ranks, n]`` to ``[1, n]`` in the dtype of ``rows``, in rank order. Above
    ``UNROLLED_RANKS``, the order is that of torch's sum, which depends only on the shape (law
    4)."""
    return ops.sum_rows(rows) if _opaque.get() else _sum_rows(rows)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate columns ``[r, n]`` of several parts."""
    return ops.join(list(parts)) if _opaque.get() else _join(parts)


def decode_and_sum_by_index(
    codec: SparseCodec, wires: Tensor, numel: int, dtype: torch.dtype
) -> Tensor:
    """Decode rows of sparse values and sum them by index to ``[numel]``."""
    if not _opaque.get():
        return sum_by_index(*codec.decode_sparse(wires, numel, dtype), numel)
    return ops.decode_and_sum_by_index(wires, _name(codec), numel, dtype)


# --- codecs and domains by name -------------------------------------------------------------------

_arguments: dict[str, Any] = {}
"""Codecs and domains by their names in arguments of operators."""


def _is_plain(codec: Codec) -> bool:
    """Whether a codec computes directly: always for ``raw``, which costs nothing and stays visible
    to the compiler."""
    return isinstance(codec, RawCodec) or not _opaque.get()


def _name(codec: Codec) -> str:
    """Return the name of a codec, marked if it encodes values that are already in its domain."""
    entered = codec.domain == VALUES and codec_of(codec.spec).domain != VALUES
    words = [codec.spec, "entered" if entered else "", codec.variant]
    return _register(", ".join(filter(None, words)), codec.with_constants(()))


def _tables(codec: Codec, like: Tensor) -> tuple[list[Tensor], ...]:
    """The last argument of an operator: the constants of its codec, if it has any."""
    tables = codec.constants(like)
    return ([*tables],) if tables else ()


def _register(name: str, argument: Any) -> str:
    _arguments[name] = argument
    return name


def lookup(name: str) -> Any:
    """Return the codec or domain of an operator's argument."""
    return _arguments[name]


# --- implementations ------------------------------------------------------------------------------


Tables = Sequence[Tensor] | None


def _codec(name: str, tables: Tables, salt: Sequence[int] = ()) -> Codec:
    codec: Codec = _arguments[name]
    return (codec.with_constants(tables) if tables else codec).salted(*salt)


def _encode(rows: Tensor, name: str, salt: Sequence[int], tables: Tables = None) -> Tensor:
    return _codec(name, tables, salt).encode_rows(rows).contiguous()


def _encode_with_feedback(
    rows: Tensor, residual: Tensor, name: str, salt: Sequence[int]
) -> tuple[Tensor, Tensor]:
    wire, error = _with_feedback(_codec(name, None, salt), rows, residual)
    return wire.contiguous(), error.contiguous()


def _with_feedback(codec: Codec, rows: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    target = rows.to(residual.dtype) + residual
    wire = codec.encode_rows(target.to(rows.dtype))
    decoded = codec.decode_rows(wire, rows.shape[1], rows.dtype).to(residual.dtype)
    error = torch.where(decoded.isfinite() & target.isfinite(), target - decoded, 0)
    return wire, error


def _encode_parts(
    rows: Tensor, name: str, salt: Sequence[int], tables: Tables = None
) -> list[Tensor]:
    return [part.contiguous() for part in _codec(name, tables, salt).encode_parts(rows)]


def _decode(
    wire: Tensor, name: str, numel: int, dtype: torch.dtype, tables: Tables = None
) -> Tensor:
    return _codec(name, tables).decode_rows(wire, numel, dtype).contiguous()


def _decode_parts(
    parts: Sequence[Tensor],
    name: str,
    numel: int,
    dtype: torch.dtype,
    tables: Tables = None,
) -> Tensor:
    return _codec(name, tables).decode_parts(parts, numel, dtype).contiguous()


def _used_bytes(wire: Tensor, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    return _arguments[name].used_bytes(wire, numel, dtype)


def _enter(rows: Tensor, name: str) -> Tensor:
    return _arguments[name].to_domain(rows).contiguous()


def _leave(rows: Tensor, name: str) -> Tensor:
    return _arguments[name].from_domain(rows).contiguous()


def _sum_rows(rows: Tensor) -> Tensor:
    if rows.shape[0] > UNROLLED_RANKS:
        return rows.sum(dim=0, keepdim=True)
    total = rows.narrow(0, 0, 1)
    for rank in range(1, rows.shape[0]):
        total = total + rows.narrow(0, rank, 1)
    return total


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=1)


def _sum_by_index(wires: Tensor, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    indices, values = _arguments[name].decode_sparse(wires, numel, dtype)
    return sum_by_index(indices, values, numel)


def encode_pieces(
    rows: Tensor, name: str, salt: Sequence[int], tables: Tables = None
) -> tuple[Tensor, ...]:
    """As ``encode``, in pieces that are concatenated on the wire: see ``Codec.encode_pieces``."""
    return _codec(name, tables, salt).encode_pieces(rows)


# --- output shapes --------------------------------------------------------------------------------


def _shape_of_encode(rows: Tensor, name: str, salt: Sequence[int], tables: Tables = None) -> Tensor:
    count, numel = rows.shape
    return _bytes(rows, count, _arguments[name].wire_bytes(numel, rows.dtype))


def _shapes_with_feedback(
    rows: Tensor, residual: Tensor, name: str, salt: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return _shape_of_encode(rows, name, salt), residual.new_empty(residual.shape)


def _shapes_of_parts(
    rows: Tensor, name: str, salt: Sequence[int], tables: Tables = None
) -> list[Tensor]:
    count, numel = rows.shape
    return [_bytes(rows, count, size) for size in _arguments[name].parts(numel, rows.dtype)]


def _shape_of_decode(
    wire: Tensor, name: str, numel: int, dtype: torch.dtype, tables: Tables = None
) -> Tensor:
    result = dtype if _arguments[name].lossless else accumulation_dtype(dtype)
    return wire.new_empty((wire.shape[0], numel), dtype=result)


def _bytes(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.uint8)


Function = Callable[..., Any]
CODEC = "str codec, SymInt numel, ScalarType dtype"
ENCODE, TABLES = "Tensor rows, str codec, int[] salt", "Tensor[]? tables=None"
SIGNATURES: dict[str, tuple[str, Function, Function]] = {
    "encode": (f"({ENCODE}, {TABLES}) -> Tensor", _encode, _shape_of_encode),
    "encode_with_feedback": (
        "(Tensor rows, Tensor residual, str codec, int[] salt) -> (Tensor, Tensor)",
        _encode_with_feedback,
        _shapes_with_feedback,
    ),
    "encode_parts": (
        f"({ENCODE}, {TABLES}) -> Tensor[]",
        _encode_parts,
        _shapes_of_parts,
    ),
    "decode": (f"(Tensor wire, {CODEC}, {TABLES}) -> Tensor", _decode, _shape_of_decode),
    "decode_parts": (
        f"(Tensor[] parts, {CODEC}, {TABLES}) -> Tensor",
        _decode_parts,
        lambda parts, *how: _shape_of_decode(parts[0], *how),
    ),
    "used_bytes": (
        f"(Tensor wire, {CODEC}) -> Tensor",
        _used_bytes,
        lambda wire, *how: wire.new_empty(wire.shape[:1], dtype=torch.int64),
    ),
    "enter": ("(Tensor rows, str domain) -> Tensor", _enter, lambda rows, _: _like(rows)),
    "leave": ("(Tensor rows, str domain) -> Tensor", _leave, lambda rows, _: _like(rows)),
    "sum_rows": (
        "(Tensor rows) -> Tensor",
        _sum_rows,
        lambda rows: rows.new_empty((1, rows.shape[1])),
    ),
    "join": (
        "(Tensor[] parts) -> Tensor",
        _join,
        lambda parts: parts[0].new_empty((parts[0].shape[0], sum(part.shape[1] for part in parts))),
    ),
    "decode_and_sum_by_index": (
        f"(Tensor wires, {CODEC}) -> Tensor",
        _sum_by_index,
        lambda wires, _, numel, dtype: wires.new_empty((numel,), dtype=accumulation_dtype(dtype)),
    ),
}


def _like(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


IMPLEMENTATIONS: dict[Any, Function] = {}
"""The implementation of each operator."""
ROLES: dict[Any, str] = {}
"""The role of each operator: encode, decode, used_bytes, enter, leave, sum or join; ``fused`` for
one that combines several of these."""
_library = torch.library.Library("commpass", "FRAGMENT")


def define(name: str, signature: str, function: Function, shapes: Function, role: str) -> Any:
    """Define an operator with its signature, implementation, output shapes and role."""
    _library.define(name + signature)
    _library.impl(name, ambient_free(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"commpass::{name}", shapes, lib=_library)
    operator = getattr(ops, name).default
    IMPLEMENTATIONS[operator], ROLES[operator] = function, role
    return operator


_library.define("constant(str name, str device, str codec, str variant) -> Tensor")


def _constant(name: str, device: str, spec: str, variant: str) -> Tensor:
    _ensure_constant(name, spec, variant)
    # The caller owns the result of an operator.
    return constants.on_device(name, device).clone()


def _shape_of_constant(name: str, device: str, spec: str, variant: str) -> Tensor:
    _ensure_constant(name, spec, variant)
    return constants.shape_of(name, device)


def _ensure_constant(name: str, spec: str, variant: str) -> None:
    """Create a constant that a graph from a cache of compiled code refers to."""
    if constants.is_known(name):
        return
    codec = codec_of(spec)
    if not constants.is_known(name) and (sizes := re.findall(r"\d+", variant)):
        codec.of_sum(*map(int, sizes))


_library.impl("constant", ambient_free(_constant), "CompositeExplicitAutograd")
torch.library.register_fake("commpass::constant", _shape_of_constant, lib=_library)
CONSTANT = ops.constant.default
"""The operator for a constant of a codec in a graph that has no input for it."""

_ROLE_OF = {
    "encode_with_feedback": "encode",
    "encode_parts": "encode",
    "decode_parts": "decode",
    "decode_and_sum_by_index": "decode",
    "sum_rows": "sum",
}
for _operator, (_signature, _function, _shapes) in SIGNATURES.items():
    define(_operator, _signature, _function, _shapes, _ROLE_OF.get(_operator, _operator))
