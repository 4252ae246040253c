"""A run as columns: everything that people see of it afterwards."""

from evenstep.observe.history.history import History
from evenstep.observe.history.window import RunWindow

__all__ = ["History", "RunWindow"]
