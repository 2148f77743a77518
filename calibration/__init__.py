"""Calibration: what the values of a model's tensors are on the user's data."""
