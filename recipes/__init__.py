"""Presets: recipes without a model, one YAML file each."""
