"""Passes for Inductor's post-grad slot: what must be said as late as possible."""
