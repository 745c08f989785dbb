"""Pilots: what a dynamic network will touch next, learned from the steps that it has run. No torch."""
