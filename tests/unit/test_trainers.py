"""What the integrations with trainers refuse before anything is sent."""

from __future__ import annotations

import pytest
from refusals import refusals
from torch import nn

from commpass.errors import PolicyError
from commpass.parallel import compress_ddp, compress_fsdp
from commpass.parallel.trainers import checked_options


def test_options_are_checked_before_there_is_a_model():
    assert checked_options("call", {"policy": "balanced"}) == {"policy": "balanced"}
    assert checked_options("call", {"profile": "ethernet-1g"})["policy"] == "lossless"
    told = refusals(
        lambda: checked_options("some.call", {"profil": "ethernet-1g"}),
        lambda: checked_options("some.call", {"policy": "balance"}),
    )
    assert "some.call has no option 'profil'" in told[0]
    assert "'profile'" in told[0]
    assert "balanced" in told[1]


def test_engine_of_deepspeed_is_refused_with_what_to_do():
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(2, 2)
    for call in (compress_ddp, compress_fsdp):
        with pytest.raises(PolicyError, match=r"DeepSpeed's engine.*engine\.no_sync\(\)"):
            call(engine, "balanced")
