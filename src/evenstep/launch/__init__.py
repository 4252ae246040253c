"""What starts and stops workers, and how a worker finds out where it is."""
