"""Starts and stops workers, and tells a worker process how it was started."""
