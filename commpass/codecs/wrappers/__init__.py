"""Codecs that prepare values for another one."""
