"""Faults at random moments of real runs, each compared with one process that trained alone."""
