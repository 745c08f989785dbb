"""A recorded step run on a device that is not here: the same controller, over a paper machine."""
