"""Recipes: a chain of passes with its data, gates and output, as YAML."""
