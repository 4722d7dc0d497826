"""simplify: what algebra says need not be sent is not sent. No codec is as cheap as that.

needs: a functional graph of aten operators and collectives with fake values.
gives: the same graph with fewer or smaller collectives, and a record of every rule that was
applied.
changes: nothing with the bit-exact rules; the others round a float sum differently, as it is when
the number of ranks changes
(``Policy(reassociate=False)`` leaves them out; ``"off"`` leaves out all).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from commpass.costmodel import Profile
from commpass.passes.discover import GraphSite
from commpass.passes.fx.parse import graph_modules, is_wait, parse
from commpass.passes.simplify.editor import Editor
from commpass.passes.simplify.outputs import output_memory, separate_outputs
from commpass.passes.simplify.rules import RULES, Applied, Rule
from commpass.plan import Simplification
from commpass.policy import Policy

SWEEPS = 8
"""A rule may make room for another; what is not found after so many sweeps is left."""
EARLY = ("waits", "same")
"""The rules of the first sweep: equal collectives are one before anything makes them look
different."""
LATE = ("alone",)
"""The rules of the last sweep: other ranks' groups may have more than one rank, and what only one
rank takes away must not make room for rules that it then applies alone."""


def simplify(
    gm: fx.GraphModule,
    found: Sequence[GraphSite],
    policy: Policy,
    profile: Profile,
    local: bool = True,
) -> tuple[Simplification, ...]:
    """Applies the rules until none fits any more. Linear in the nodes of the graph, for each
    sweep. Without ``local`` those are left out that look for the rank's own part."""
    if policy.off:
        return ()
    applied: list[Simplification] = []
    allowed = {each.call.node: each.allowed for each in found}
    rules = [
        rule for rule in RULES if (rule.exact or policy.reassociate) and (local or not rule.own)
    ]
    owning = {rule.name for rule in RULES if rule.own}
    for prefix, module in graph_modules(gm):
        if not any(parse(node) is not None for node in module.graph.nodes):
            continue
        editor = Editor(module, profile, allowed)
        done = _apply(editor, rules)
        if done:
            module.graph.lint()
            module.recompile()
        applied += [
            Simplification(
                rule=rule,
                site=prefix + did.site,
                into=did.text,
                saved_bytes=did.saved_bytes,
                group=editor.group_of[did.site],
                moved=did.moved,
                own=rule in owning,
                numbers=tuple(editor.number_of[name] for name in (did.site, *did.others)),
            )
            for rule, did in done
        ]
    return tuple(applied)


def _apply(editor: Editor, rules: Sequence[Rule]) -> list[tuple[str, Applied]]:
    """Sweeps over a graph until no rule fits any more."""
    outputs = output_memory(editor.graph)
    done = _sweep(editor, [rule for rule in rules if rule.name in EARLY])
    for _ in range(SWEEPS - 1):
        now = _sweep(editor, [rule for rule in rules if rule.name not in LATE])
        done += now
        if not now:
            break
    done += _sweep(editor, [rule for rule in rules if rule.name in LATE])
    if done:
        separate_outputs(editor, outputs)
    return done


def _sweep(editor: Editor, rules: Sequence[Rule]) -> list[tuple[str, Applied]]:
    """Tries the rules once at every node, in graph order."""
    editor.refresh()
    done: list[tuple[str, Applied]] = []
    at: dict[Any, list[Rule]] = {}
    for node in list(editor.graph.nodes):
        if not editor.lives(node) or node.op != "call_function":
            continue
        if node.target not in at:
            waits = is_wait(node)
            at[node.target] = [
                rule for rule in rules if (node.target in rule.at if rule.at else waits)
            ]
        for rule in at[node.target]:
            if editor.lives(node) and (did := rule.apply(node, editor)) is not None:
                done.append((rule.name, did))
    return done


__all__ = ["RULES", "simplify"]
