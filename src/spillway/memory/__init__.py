"""The one place that keeps the budget: what is allowed, what is there, and what has to leave for what comes."""
