"""The matrix: every script against one process of plain torch, in every way to run it."""
