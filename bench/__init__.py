"""Measurements: one timer, one list of providers, results as data. Run from the repository root with `python -m`."""
