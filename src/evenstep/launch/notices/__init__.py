"""Notices that this machine will be taken away, of clouds that give them by their metadata."""
