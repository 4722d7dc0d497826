"""The lines above tables: how many sites, bytes and microseconds there are in all."""

from __future__ import annotations

from commpass.plan.totals import Totals
from commpass.report.numbers import micros, ratio, size
from commpass.report.run import Run
from commpass.utils.printable import plural


def totals_line(of: Totals) -> str:
    """Return sites, bytes and times. A graph that fell back counts as it was before."""
    unknown = f" ({of.unknown} of unknown size not counted)" if of.unknown else ""
    waits = (
        f", of which a rank waits {micros(of.exposed_us, of.unmoved_us)}"
        f" ({micros(of.unmoved_us)} before exchanges were moved)"
        if of.unmoved_us > 0
        else ""
    )
    return (
        f"{plural(of.sites, 'site')}, {of.compressed} compressed; {size(of.bytes)} ->"
        f" {size(of.wire_bytes)} ({ratio(of.wire_bytes, of.bytes)}){unknown}; predicted"
        f" {micros(of.plain_us, of.plain_us)} -> {micros(of.predicted_us, of.plain_us)}{waits}"
    )


def headlines(run: Run) -> list[str]:
    """Return the bytes that leave the rank, and those that need not be sent at all."""
    of, sent, lines = run.totals, run.sent, []
    if of.sites:
        left_out = f", {sent.unknown} of unknown size not counted" if sent.unknown else ""
        share = ratio(sent.after, sent.before)
        lines.append(
            f"sent to other ranks: {size(sent.before)} -> {size(sent.after)} ({share}){left_out}"
        )
    if of.simplified:
        found, gone = run.original_sites
        which = (
            f"{gone} of {plural(found, 'collective')} not sent at all"
            if gone
            else f"{of.simplified} made smaller"
        )
        lines.append(f"simplified: {which}, {size(of.saved_bytes)} less handed over")
    return lines
