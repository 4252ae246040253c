"""The same training job for each system that handles roster changes.

Started by `bench.transitions`, not by hand. They import nothing but torch and their own runtime.
"""
