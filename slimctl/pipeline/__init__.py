"""Runs passes on a model, checks what each promised, and packages the result."""
