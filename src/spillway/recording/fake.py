"""Fake tensors: shapes without bytes, so that a step of any size is recorded in no memory to speak of.

A model has to be built among them, its batch too, or its bytes would be real. Ops then compute shapes alone, and tell
the same lifetimes, sizes and versions that they would with content. Where torch has another formula for subclasses of
tensors and under dispatch modes, fake tensors take that one: attention with a mask adds it into a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_map_only

from spillway.errors import UsageError


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Within, every new tensor is fake.

    Raises UsageError for a step that needs the content of a tensor, such as a loss read as a number.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"The step cannot be recorded on fake tensors, because {error.func} needs to know what a tensor holds; "
            f"record it on real ones."
        ) from error


def tensors_are_fake() -> bool:
    """Whether new tensors are fake here."""
    of_torch = cast(Any, torch._C)
    return of_torch._get_dispatch_mode(of_torch._TorchDispatchModeKey.FAKE) is not None


def as_fake(mode: FakeTensorMode, tree: Any) -> Any:
    """The same nest of lists and mappings with every tensor fake."""
    return tree_map_only(torch.Tensor, lambda tensor: cast(Any, mode).from_tensor(tensor), tree)
