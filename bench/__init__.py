"""Benchmarks. Each module prints its results, or writes them to docs/."""
