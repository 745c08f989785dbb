"""Watches one step, on real or on fake tensors, and writes down what it does: an `ir.Step`."""
