"""Side-by-side runs against peers, and the real models and data that they, the demo and tests use."""
