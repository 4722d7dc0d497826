"""Codecs that prepare values for an inner codec."""
