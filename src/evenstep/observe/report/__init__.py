"""What is kept of a run, or of several side by side: one page, and its numbers as tables."""
