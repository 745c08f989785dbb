"""`auto`: one action for every block, all of them together, for the size of the input and the budget at hand."""
