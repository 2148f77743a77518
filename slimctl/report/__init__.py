"""Reports for people, made from a manifest."""
