"""Small models of many families, and a way to tell whether two of them are in the same state to the bit.

Each entry of FAMILIES builds a model, its optimizers, five batches and the function that runs one step. The same seed
builds the same family, so that it can be trained once plainly and once managed. Built and trained one at a time: the
steps draw from torch's and Python's global random streams, which building seeds.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.cpu.families_of_autograd import AUTOGRAD
from tests.cpu.families_of_pictures import PICTURES
from tests.cpu.families_of_sequences import SEQUENCES
from tests.cpu.families_of_transformers import TRANSFORMERS
from tests.cpu.family import Build, Built

__all__ = ["FAMILIES", "Build", "Built", "Image", "State", "difference", "state_of"]

FAMILIES: Mapping[str, Build] = MappingProxyType(PICTURES | SEQUENCES | TRANSFORMERS | AUTOGRAD)


class Image(NamedTuple):
    """All that a tensor is, by value; the bytes are in the order of the elements, whatever the strides."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data: bytes


State = dict[str, Image | bytes | str]


def state_of(models: nn.Module | Sequence[nn.Module], optimizers: Optimizer | Sequence[Optimizer]) -> State:
    """Parameters, buffers, gradients, optimizer state and random streams, copied."""
    state: State = {}
    for number, model in enumerate([models] if isinstance(models, nn.Module) else models):
        state.update((f"model {number}: {name}", value) for name, value in _of_model(model))
    for number, optimizer in enumerate([optimizers] if isinstance(optimizers, Optimizer) else optimizers):
        state.update((f"optimizer {number}: {name}", value) for name, value in _of_optimizer(optimizer))
    return state | _of_random_streams()


def difference(a: State, b: State) -> str | None:
    """The first thing in which two states differ, in the order in which they were collected."""
    for name in a | b:
        if name not in a or name not in b:
            return f"{name} is only in the {'first' if name in a else 'second'}"
        if a[name] != b[name]:
            return f"{name}: {_between(a[name], b[name])}"
    return None


def _between(a: Image | bytes | str, b: Image | bytes | str) -> str:
    if isinstance(a, bytes) and isinstance(b, bytes):
        return "not at the same place of the stream"
    if not isinstance(a, Image) or not isinstance(b, Image):
        return f"{_brief(a)} against {_brief(b)}"
    for part in ("dtype", "shape", "strides"):
        if getattr(a, part) != getattr(b, part):
            return f"{part} {getattr(a, part)} against {getattr(b, part)}"
    differing = sum(x != y for x, y in zip(a.data, b.data, strict=True))
    return f"{differing} of {len(a.data)} bytes differ"


def _brief(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, Image) else str(value)


def _of_model(model: nn.Module) -> Iterator[tuple[str, Image | str]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"parameter {name}", _image(parameter)
        yield f"gradient of {name}", "none" if parameter.grad is None else _image(parameter.grad)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"buffer {name}", _image(buffer)


def _of_optimizer(optimizer: Optimizer) -> Iterator[tuple[str, Image | str]]:
    saved = optimizer.state_dict()
    for number, entries in saved["state"].items():
        for key, value in entries.items():
            yield f"{key} of parameter {number}", _image(value) if isinstance(value, Tensor) else repr(value)
    for number, group in enumerate(saved["param_groups"]):
        yield f"group {number}", repr(group)


def _of_random_streams() -> State:
    return {
        "torch's random stream": _image(torch.get_rng_state()).data,
        "Python's random stream": pickle.dumps(random.getstate()),
        "NumPy's random stream": pickle.dumps(numpy.random.get_state()),
    }


def _image(tensor: Tensor) -> Image:
    values = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return Image(str(tensor.dtype), tuple(tensor.shape), tensor.stride(), values.view(torch.uint8).numpy().tobytes())
