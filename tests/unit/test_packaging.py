"""The package's metadata agrees with its contents."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import commpass

ROOT = Path(commpass.__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_license_is_there_in_full():
    assert PROJECT["license"] == "Apache-2.0"
    (name,) = PROJECT["license-files"]
    text = (ROOT / name).read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert not any(each.startswith("License ::") for each in PROJECT["classifiers"])


def test_package_is_typed_and_says_for_which_pythons():
    assert (ROOT / "commpass" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]
    found = re.findall(r":: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert found == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={found[0]}"


def test_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert next(each for each in versions if each != "Unreleased") == PROJECT["version"]
    assert f"\n[{PROJECT['version']}]: https://" in text


def test_files_that_the_source_distribution_adds_are_there():
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        what, *names = line.split()
        if what in ("include", "graft"):
            assert all((ROOT / name).exists() for name in names), line


def test_every_url_is_that_of_the_project():
    assert set(PROJECT["urls"]) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(
        url.startswith("https://github.com/commpass/commpass") for url in PROJECT["urls"].values()
    )


def test_data_of_packages_is_in_the_wheel():
    """Each file of a package that is no source matches a pattern of its package-data."""
    data = PYPROJECT["tool"]["setuptools"]["package-data"]
    known = {
        path
        for package, patterns in data.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = {
        path
        for path in (ROOT / "commpass").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert files == known
    assert ROOT / "commpass" / "costmodel" / "machines" / "dgx-h100.toml" in known
