"""Execution-provider profiles: one YAML file each."""

from slimctl.targets.load import load_target, target_names

__all__ = ["load_target", "target_names"]
