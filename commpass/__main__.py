"""``python -m commpass``: the command line."""

from commpass.report.cli import main

main()
