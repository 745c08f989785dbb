"""The part in C++: everything works without it."""
