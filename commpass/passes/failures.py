"""Failures of single sites. The passes run again without these sites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from commpass.errors import CommpassError


class SiteFailure(CommpassError):
    """A pass could not carry out some sites. ``errors`` maps their names to the errors."""

    def __init__(self, errors: dict[str, Exception]):
        super().__init__("; ".join(f"{name}: {error}" for name, error in errors.items()))
        self.errors = errors

    @property
    def first(self) -> Exception:
        return next(iter(self.errors.values()))


@dataclass
class SiteErrors:
    """The errors of sites, by name."""

    errors: dict[str, Exception] = field(default_factory=dict)

    @contextmanager
    def of(self, *sites: str) -> Iterator[None]:
        """Record an error as one of these sites. Raise it if no site is given."""
        try:
            yield
        except Exception as error:
            if not sites:
                raise
            for site in sites:
                self.errors.setdefault(site, error)


@contextmanager
def site_errors() -> Iterator[SiteErrors]:
    """Collect the errors of sites, so that one round finds all of them.

    Raises SiteFailure at the end if there are any. An error of no site is raised unchanged, unless
    errors of sites were found, which may have caused it.
    """
    found = SiteErrors()
    try:
        yield found
    except Exception as error:
        if found.errors:
            raise SiteFailure(found.errors) from error
        raise
    if found.errors:
        raise SiteFailure(found.errors) from next(iter(found.errors.values()))
