"""Ops that read bytes past the dispatcher find them, also where they have left."""

from __future__ import annotations

import re

import pytest
import torch

from spillway.internals.host_reads import HOST_READS
from tests.cpu.another_process import run_python


@pytest.mark.long
@pytest.mark.parametrize("when", ["leave_when_told", "leave_for_room"])
def test_what_is_read_past_the_dispatcher_is_there_when_it_is_read(when: str) -> None:
    done = run_python(f"from tests.cpu import host_reading; host_reading.{when}()", SPILLWAY_NATIVE="arena")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("full", HOST_READS)
def test_an_op_that_reads_past_the_dispatcher_is_one_that_autograd_takes_apart(full: str) -> None:
    """Another torch may make an op of it, which comes to the engine by itself."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    schema = torch._C._get_schema(*re.fullmatch(r"(.*?)(?:\.(.*))?", full).groups(default=""))  # type: ignore[union-attr]
    for place in HOST_READS[full] or ():
        assert str(schema.arguments[place].type) == "Tensor"
