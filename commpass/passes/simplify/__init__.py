"""simplify: removes or shrinks collectives by algebraic rules. This is cheaper than any codec.

needs: a functional graph of aten operators and collectives with fake values.
gives: the same graph with fewer or smaller collectives, and a record of every applied rule.
changes: nothing with the bit-exact rules. The others round a float sum differently, as a change of
the number of ranks does. ``Policy(reassociate=False)`` disables these; ``"off"`` disables all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from commpass.costmodel import Profile
from commpass.passes.context import PassContext
from commpass.passes.fx.parse import graph_modules, is_collective, is_wait
from commpass.passes.graph_site import GraphSite
from commpass.passes.simplify.editor import Editor
from commpass.passes.simplify.outputs import output_memory, separate_outputs
from commpass.passes.simplify.rules import RULES, Applied, Phase, Rule
from commpass.plan import Simplification
from commpass.policy import Policy

SWEEPS = 8
"""The maximum number of sweeps. One rule may enable another."""
SIMPLE = (Phase.EARLY, Phase.MAIN)
"""The phases of a sweep before the general rules are tried."""


def run(context: PassContext) -> None:
    """Simplify the graph."""
    given = context.input
    applied = simplify(given.gm, context.found, given.policy, given.profile, given.own)
    context.plan_with(simplified=applied)
    context.sites_changed = True  # repeated waits are removed without a record


def simplify(
    gm: fx.GraphModule,
    found: Sequence[GraphSite],
    policy: Policy,
    profile: Profile,
    local: bool = True,
) -> tuple[Simplification, ...]:
    """Apply the rules until none matches. Linear in the number of nodes for each sweep.

    If ``local`` is false, rules that look for the rank's own part are skipped.
    """
    if policy.off:
        return ()
    applied: list[Simplification] = []
    allowed = {each.call.node: each.allowed for each in found}
    rules = [
        rule
        for rule in RULES
        if (rule.exact or policy.reassociate)
        and (local or not rule.own)
        and (policy.sequence_parallel or not rule.replicated)
    ]
    owning = {rule.name for rule in RULES if rule.own}
    for prefix, module in graph_modules(gm):
        if not any(is_collective(node) for node in module.graph.nodes):
            continue
        editor = Editor(module, profile, allowed)
        changed = editor.rebase_sizes()
        done = _apply(editor, rules)
        if done or changed:
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
    """Sweep over a graph until no rule matches."""
    outputs = output_memory(editor.graph, editor.analyze())
    done = _sweep(editor, [rule for rule in rules if rule.phase is Phase.EARLY])
    for _ in range(SWEEPS - 1):
        now = _sweep(editor, [rule for rule in rules if rule.phase in SIMPLE])
        now = now or _sweep(editor, [rule for rule in rules if rule.phase is Phase.GENERAL])
        done += now
        if not now:
            break
    done += _sweep(editor, [rule for rule in rules if rule.phase is Phase.LATE])
    if done:
        separate_outputs(editor, outputs)
    return done


def _sweep(editor: Editor, rules: Sequence[Rule]) -> list[tuple[str, Applied]]:
    """Try the rules once at every node, in graph order."""
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


__all__ = ["RULES", "run", "simplify"]
