"""The version of commpass that runs."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the version of the installed package, or "0+source" if sources run that nobody
    installed, as when a folder of them is on PYTHONPATH."""
    try:
        return version("commpass")
    except PackageNotFoundError:
        return "0+source"
