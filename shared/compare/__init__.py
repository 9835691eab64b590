"""Are two run directories the same run, and which is faster? ``python -m shared.compare D1 D2``."""
