"""Measurements of what Spillway promises: `python -m benchmarks`, or one of them by name.

Competitors stand in one run, take turns, and have a process each, so that a busy machine disturbs all alike. The
package imports nothing from here. Torch is loaded only after `__main__` has limited it to one thread.
"""
