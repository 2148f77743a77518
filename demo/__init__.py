"""One real model from fp32 to a checked int8 artifact: ``make demo``."""
