"""Where people train already: one file a library, none of which is imported before its user imports it."""
