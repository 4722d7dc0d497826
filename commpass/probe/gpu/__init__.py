"""Test kernels, links and exchanges on the GPUs of a host."""
