"""A network in a box: hosts on one Linux machine as network namespaces, linked at given rates.

    python -m benchmarks.netlab --hosts 4 --gbit 1 -- COMMAND ...    # docs/netlab.md

From Python, in a program that may start twice:

    netlab.stand_apart()  # start this program again, in new namespaces; needs root
    lab = netlab.build(netlab.Network(hosts=4, gbit=1))
    netlab.check(lab)
    netlab.run(lab, ["python", "train.py"], netlab.Course())
    lab.slow(2, 0.1)  # also lab.drop(2), lab.restore(2)
"""

from .apart import check_machine, stand_apart
from .lab import Lab, build, shaped
from .network import LabError, Network
from .ranks import Course, Outcome, run
from .rates import check, check_together

__all__ = [
    "Course",
    "Lab",
    "LabError",
    "Network",
    "Outcome",
    "build",
    "check",
    "check_machine",
    "check_together",
    "run",
    "shaped",
    "stand_apart",
]
