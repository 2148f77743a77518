"""Data sources: from a path or a name to batches of named arrays that fit the model."""
