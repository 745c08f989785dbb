"""x"""
from __future__ import annotations
def folded(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The three dimensions of a signature for one tensor. Two dimensions and fewer stand as they are, with zeros behind
    (Fig. 3); of more than three the leading ones are multiplied, on which the paper is silent."""
    match shape:
        case ():
            return 0, 0, 0
        case (rows,):
            return rows, 0, 0
        case (rows, columns):
            return rows, columns, 0
    leading = 1
    for length in shape[:-2]:
        leading *= length
    return leading, shape[-2], shape[-1]
