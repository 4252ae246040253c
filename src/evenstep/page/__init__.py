"""The live page: a run in a browser, served by a process of its own that only reads."""
