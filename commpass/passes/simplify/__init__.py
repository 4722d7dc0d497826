"""simplify: what algebra says need not be sent is not sent. No codec is as cheap as that.

needs: a functional graph of aten operators and collectives with fake values.
gives: the same graph with fewer or smaller collectives, and a record of every rule that was applied.
changes: nothing with the bit-exact rules; the others round a float sum differently, as it is when the number of ranks changes
(``Policy(reassociate=False)`` leaves them out; ``"off"`` leaves out all).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from commpass.costmodel import Profile
from commpass.passes.collective import parse
from commpass.passes.discover import Found, graph_modules
from commpass.passes.simplify.editor import Editor
from commpass.passes.simplify.rules import RULES
from commpass.plan import Simplification
from commpass.policy import Policy

SWEEPS = 8
"""A rule may make room for another; what is not found after so many sweeps is left."""


def simplify(gm: fx.GraphModule, found: Sequence[Found], policy: Policy, profile: Profile) -> tuple[Simplification, ...]:
    """Applies the rules until none fits any more. Linear in the nodes of the graph, for each sweep."""
    if policy.off:
        return ()
    applied: list[Simplification] = []
    compressible = frozenset(each.call.node for each in found if policy.terms(each.site)[0].codecs)
    for prefix, module in graph_modules(gm):
        if not any(parse(node) is not None for node in module.graph.nodes):
            continue
        editor = Editor(module, profile, compressible)
        rules = [rule for rule in RULES if rule.exact or policy.reassociate]
        before = len(applied)
        early = [rule for rule in rules if rule.name in ("waits", "same")]
        for sweep in range(SWEEPS):
            count = len(applied)
            editor.first.clear()  # what a collective takes changes from sweep to sweep
            for node in list(module.graph.nodes):
                for rule in early if sweep == 0 else rules:  # equal ones are one before anything makes them look different
                    if editor.lives(node) and (done := rule.apply(node, editor)) is not None:
                        applied.append(Simplification(rule=rule.name, site=prefix + done.site, into=done.into,
                                                      saved_bytes=done.saved_bytes))  # fmt: skip
            if sweep > 0 and len(applied) == count:
                break
        if len(applied) > before:
            module.graph.lint()
            module.recompile()
    return tuple(applied)


__all__ = ["RULES", "simplify"]
