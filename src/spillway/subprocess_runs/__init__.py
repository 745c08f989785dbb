"""A workload trained in a process of its own, so that its memory and its time are its own; and runs compared.

No torch here, except in the process itself (`child`).
"""

from __future__ import annotations
