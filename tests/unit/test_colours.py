"""One policy has one colour in all pictures."""

from __future__ import annotations

import re
from itertools import combinations

from commpass.policy import PRESETS
from commpass.report.colours import POLICIES, WAITING, colour_of


def test_known_policies_are_distinguished():
    """Plain runs and ``off`` are the same thing."""
    shown = {name: colour for name, colour in POLICIES.items() if name != "plain"}
    assert len(set(shown.values())) == len(shown)
    values = [*shown.values(), WAITING]
    rgb = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in values]
    assert all(
        sum(abs(x - y) for x, y in zip(a, b, strict=True)) > 60 for a, b in combinations(rgb, 2)
    )


def test_variants_have_the_colour_of_their_policy():
    assert colour_of("balanced, not moved") == colour_of("balanced")
    assert colour_of("plain bf16") == colour_of("bf16")
    assert colour_of("int8(block=128)") == colour_of("int8")


def test_every_name_has_a_colour_that_does_not_change():
    for name in (*PRESETS, "my policy", "", "policy.toml"):
        assert re.fullmatch("#[0-9a-f]{6}", colour_of(name))
        assert colour_of(name) == colour_of(name)
    assert colour_of("taco") == "#661100"  # chosen by its name, in any process
