"""What programs and the command line print.

``commpass.report()`` is in ``process_report``. The output of a command is in the file, or package,
of its name; exceptions are ``explain --why`` (``candidate_table``) and ``report`` (``html``).

========================  ==================================================================
``run``                   a run of a dump as data: graphs, sums, measured times. Uses
                          ``sent_bytes``, ``exchange_graphs`` and ``plan.totals``
``explain``               ``headlines``, ``sites_table``, ``layer_patterns``, ``graph_changes``
``diff``, ``html``        ``comparison``: the differences between two runs as data
``explain``, ``diff``     ``site_filter``: the options ``--module``, ``--kind``, ...
``timeline``              ``measured_timeline`` of a ``profiler_trace``; ``timeline_drawing``
                          (.png, .html) and ``timeline_json``
``codecs``                ``codec_plot``
``compare``               a package: runs the program, reads its steps, writes the page
all                       ``tables``, ``numbers``, ``site_text``, ``operators``, ``plots``,
                          ``progress``
========================  ==================================================================
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Make this package callable.

    ``commpass.report()`` then works together with ``import commpass.report.tables``, in either
    order.
    """

    def __call__(self) -> Any:
        from commpass.report.process_report import report

        return report()


sys.modules[__name__].__class__ = _CallablePackage
