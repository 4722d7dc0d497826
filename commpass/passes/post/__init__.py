"""Passes for Inductor's post-grad slots, which must run as late as possible."""
