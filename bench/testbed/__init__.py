"""A testbed for faults, shared by tests and bench: hosts, disks, live runs and their script."""
