"""The coordinator: membership as a pure machine, and the drivers around it."""
