"""The same training job, once for each way of living with workers that come and go.

Started by `bench.transitions`, never by hand. They import nothing but torch and their own runtime.
"""
