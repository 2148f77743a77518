"""Side-by-side runs against peers, and the models and data that the demo and tests use too."""
