"""What an older torch lacks is said, not left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from commpass.errors import CommpassError
from commpass.parallel import compress_pipeline


def test_pipeline_needs_functional_send_and_recv(monkeypatch):
    monkeypatch.setitem(vars(torch.ops), "_c10d_functional", SimpleNamespace())
    with pytest.raises(CommpassError, match="no functional send and recv"):
        compress_pipeline([], "off")
