"""Helpers for all other packages: ranks, seeds, files, logs, tensors."""
