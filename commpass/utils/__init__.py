"""Small helpers that any package may use."""
