"""Measures models: accuracy, distance from a reference, latency and memory."""
