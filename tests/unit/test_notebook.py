"""Plans and reports as HTML, which notebooks show."""

from __future__ import annotations

from dumps import ODD, SITES, make, site

import commpass
from commpass.report.process_report import Report
from commpass.utils import html_text


def test_plan_is_a_table_with_a_row_for_each_site():
    text = make().plan._repr_html_()
    assert text.count("<tr>") == 1 + len(SITES)
    assert "policy &#x27;balanced&#x27;" in text
    assert "<td>int8 by two-shot</td>" in text
    assert "<td>8 MiB -&gt; 2 MiB</td>" in text
    assert "<td>uncompressed</td>" in text
    assert ODD not in text  # its quotes are escaped


def test_plan_without_sites_and_untouched_plan():
    assert "<table>" not in make(sites=()).plan._repr_html_()
    text = make(fallback="pass 'choose' failed: <b>").plan._repr_html_()
    assert "failed: &lt;b&gt;" in text
    assert "int8" not in text


def test_long_table_is_cut():
    sites = [site(f"s{n}") for n in range(html_text.MOST_ROWS + 7)]
    text = make(sites=sites).plan._repr_html_()
    assert text.count("<tr>") == 1 + html_text.MOST_ROWS
    assert "and 7 more rows" in text


def test_report_is_html():
    assert "commpass has compiled nothing" in Report(())._repr_html_()
    assert isinstance(commpass.report()._repr_html_(), str)
