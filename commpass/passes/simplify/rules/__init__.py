"""The rules, in the order in which they are tried at a node."""

from commpass.passes.fx.ops import ADDITIONS, CASTS
from commpass.passes.simplify.rules.gathers import (
    AS_BYTES,
    as_bytes,
    gather_of_expand,
    gather_then_narrow,
    widen_then_gather,
)
from commpass.passes.simplify.rules.needless import constant, same, single_rank, waits
from commpass.passes.simplify.rules.parts import gather_of_scatter, own_part, scattered
from commpass.passes.simplify.rules.quantise import (
    IN_16_BITS,
    quantise_before_gather,
    quantise_in_16_bits,
)
from commpass.passes.simplify.rules.rule import Applied, Phase, Rule
from commpass.passes.simplify.rules.sequence import sequence_parallel
from commpass.passes.simplify.rules.sums import (
    expanded,
    nested_groups,
    sum_of_sums,
    widen_then_reduce,
)

RULES: tuple[Rule, ...] = (
    Rule("waits", waits, exact=True, phase=Phase.EARLY),
    Rule("alone", single_rank, exact=True, phase=Phase.LATE),
    Rule("constant", constant, exact=True),
    Rule("same", same, exact=True, phase=Phase.EARLY),
    Rule("own part", own_part, exact=True, own=True),
    Rule("gather then narrow", gather_then_narrow, exact=True, at=CASTS),
    Rule("widen then gather", widen_then_gather, exact=True),
    Rule("quantised before gather", quantise_before_gather, exact=True, phase=Phase.GENERAL),
    Rule(IN_16_BITS, quantise_in_16_bits, exact=False, phase=Phase.GENERAL),
    Rule(
        "sequence parallel",
        sequence_parallel,
        exact=False,
        replicated=True,
        phase=Phase.GENERAL,
    ),
    Rule(AS_BYTES, as_bytes, exact=True),
    Rule("gather of expand", gather_of_expand, exact=True),
    Rule("expand", expanded, exact=False),
    Rule("widen then reduce", widen_then_reduce, exact=False),
    Rule("sum of sums", sum_of_sums, exact=False, at=ADDITIONS),
    Rule("scattered", scattered, exact=False, own=True),
    Rule("gather of scatter", gather_of_scatter, exact=False),
    Rule("nested groups", nested_groups, exact=False),
)

__all__ = ["RULES", "Applied", "Phase", "Rule"]
