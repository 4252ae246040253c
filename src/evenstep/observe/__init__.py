"""What people see of a run: totals, pictures and texts, made from the records of its journal."""
