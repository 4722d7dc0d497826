"""The command line: reads arguments, hands the work on. Results go to stdout, errors as one line to
stderr."""

# Commands are listed by ``--help`` in the order in which they are imported here.
# isort: off
from commpass.report.cli.app import app
from commpass.report.cli import plans, pictures, coding, predicting, machine

# isort: on
from commpass.report.cli.streams import print_whatever_the_encoding

__all__ = ["app", "coding", "machine", "main", "pictures", "plans", "predicting"]


def main() -> None:
    print_whatever_the_encoding()
    app()
