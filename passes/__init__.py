"""The built-in passes: flat, one file each. Files with a leading underscore are parts of a pass."""
