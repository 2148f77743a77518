"""Errors, the pass contract, the registry and file handling: what everything else builds on."""
