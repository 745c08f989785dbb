"""`spillway build`: the native parts, compiled now and not when a session first needs them."""

from __future__ import annotations

from spillway.cli.common import Json, print_json


def build_(*, json: Json = False) -> None:
    """Compile the native parts, unless they are there, and say where they lie.

    Sessions do so by themselves when they first need them. Without a compiler they run without them, and slower.
    """
    from spillway.native import library

    made = {part.name: str(library.build(part)) for part in library.PARTS}
    if json:
        print_json(made)
    else:
        print(*made.values(), sep="\n")
