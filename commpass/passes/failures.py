"""Failures that belong to single sites: the passes run once more without those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from commpass.errors import CommpassError


class SiteFailure(CommpassError):
    """A pass could not carry out some sites: ``errors`` has the error of each, by its name."""

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
        """Keeps an error as that of these sites. Without any, it is raised."""
        try:
            yield
        except Exception as error:
            if not sites:
                raise
            for site in sites:
                self.errors.setdefault(site, error)


@contextmanager
def site_errors() -> Iterator[SiteErrors]:
    """Collects the errors of sites, so that one round finds all of them. Raises SiteFailure at the
    end where there are any. An error of no site is raised as it is, unless it may follow from those
    of sites."""
    found = SiteErrors()
    try:
        yield found
    except Exception as error:
        if found.errors:
            raise SiteFailure(found.errors) from error
        raise
    if found.errors:
        raise SiteFailure(found.errors) from next(iter(found.errors.values()))
