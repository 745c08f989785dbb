"""PAPAYA: which method pays, at which batch size; from measurements, without torch."""
