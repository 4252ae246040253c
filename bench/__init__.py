"""What is measured, against whom. Each file prints or writes what docs/ quotes."""
