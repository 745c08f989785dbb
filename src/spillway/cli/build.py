"""`spillway build`: the native part, compiled now and not when a session first needs it."""

from __future__ import annotations

from spillway.cli.common import Json, print_json


def build_(*, json: Json = False) -> None:
    """Compile the native part, unless it is there, and say where it lies.

    Sessions do so by themselves when they first need it. Without a compiler they run without it, and slower.
    """
    from spillway.native import library

    made = library.build()
    if json:
        print_json({"library": str(made)})
    else:
        print(made)
