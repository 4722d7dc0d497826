"""``python -m commpass``: the command line."""

from commpass.cli import main

main()
