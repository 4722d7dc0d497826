"""Fields of plans that older versions wrote under other names."""

from __future__ import annotations

from typing import Any

SITE_FIELDS = {"word": "annotation", "obstacle": "unsupported_reason"}


def plan_from_older(plan: Any) -> Any:
    """Return a decoded plan with today's names of fields. What is no plan is returned unchanged."""
    sites = plan.get("sites") if isinstance(plan, dict) else None
    if not isinstance(sites, list):
        return plan
    return plan | {"sites": [_renamed(site) for site in sites]}


def dump_from_older(dump: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded dump with today's names of fields."""
    return dump | {"plan": plan_from_older(dump["plan"])} if "plan" in dump else dump


def _renamed(site: Any) -> Any:
    if not isinstance(site, dict):
        return site
    return {SITE_FIELDS.get(name, name): value for name, value in site.items()}
