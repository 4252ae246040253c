"""The demo: `make demo`, or `python -m bench.demo`."""
