"""Pure functions on arrays. They know nothing of graphs."""
