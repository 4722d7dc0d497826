"""Commpass runs from sources that nobody installed."""

import importlib.metadata
import subprocess
import sys

import pytest

from commpass.utils.version import own_version

RUN = """
import importlib.metadata

def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.version = missing
import commpass
import commpass.collectives.public
import commpass.probe.run
import commpass.report.html.page
print(commpass.__version__)
"""


def test_version_is_that_of_the_installed_package():
    assert own_version() == importlib.metadata.version("commpass")


@pytest.mark.slow
def test_sources_without_an_installed_package_can_be_used():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0+source"
