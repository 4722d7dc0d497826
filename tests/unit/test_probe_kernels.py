"""How the probe compiles the codecs that it times."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from commpass.codecs import codec
from commpass.probe import kernels

CODECS = ("int8", "int4", "fp8")
"""Of one class."""


@pytest.mark.parametrize("role", ["encode", "decode"])
def test_codecs_of_one_class_are_all_compiled(role, monkeypatch):
    """Codecs share their functions, and Dynamo limits the number of compilations of one."""
    compiled = []

    def backend(gm, inputs):
        compiled.append(gm)
        return gm.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in CODECS:
            coder, rows = codec(name), torch.ones(1, 4096)
            function = coder.encode_rows
            if role == "decode":
                rows, function = (
                    coder.encode_rows(rows),
                    lambda wire, coder=coder: coder.decode_rows(wire, 4096, torch.float32),
                )
            found = kernels._compiled(function, rows)(rows)
            assert torch.equal(found, function(rows))
    assert len(compiled) == len(CODECS)
