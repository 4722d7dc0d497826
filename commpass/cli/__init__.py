"""The command line: each command has a file that parses its arguments and calls the implementation.

Results are printed to stdout, errors as one line to stderr.
"""

# Commands are listed by ``--help`` in the order in which they are imported here.
# isort: off
from commpass.cli.app import app, print_whatever_the_encoding
from commpass.cli import (
    explain,
    diff,
    compare,
    report,
    graph,
    timeline,
    codecs,
    lower,
    breakeven,
    simulate,
    calibrate,
    probe,
    doctor,
)

# isort: on

__all__ = [
    "app",
    "breakeven",
    "calibrate",
    "codecs",
    "compare",
    "diff",
    "doctor",
    "explain",
    "graph",
    "lower",
    "main",
    "probe",
    "report",
    "simulate",
    "timeline",
]


def main() -> None:
    print_whatever_the_encoding()
    app()
