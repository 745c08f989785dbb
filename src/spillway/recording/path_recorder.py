"""Steps of a dynamic network, each written down as the path that its forward took, at little cost an op.

Only the forward is watched: the backward and the optimizer run as they always do. What a whole step does, with the
lifetimes of storages, is for `recorder.py`. `ForwardRecorder` takes ops from whoever has them: a session, whose steps
run anyway (`session/foreseen_steps.py`), or `PathRecorder` (`workloads/recorded.py`), which runs steps to record them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import get_ident
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spillway.engines.tensors.calls import operands
from spillway.engines.tensors.cpu_machine import tensors_of
from spillway.engines.tensors.ops import OpInfo
from spillway.errors import UsageError
from spillway.internals.dispatch_key import unwatched
from spillway.internals.private import storage_address, storage_of, unheard, unheard_by_modes
from spillway.pilots.architecture import Architecture, control_statements
from spillway.pilots.idioms import folded
from spillway.pilots.paths import Dynamism, Floats, OpSignature, ParameterStorage, PathOp, Site
from spillway.recording.formulas import flops_of, traffic_of

_TELLS_THE_HOST: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""After ops with these tags the host knows what tensors hold, so that what follows may depend on it."""


@final
class _Op:
    """What does not change about an op: how it is written down."""

    __slots__ = ("asks", "info", "name", "signatures")

    def __init__(self, func: Any) -> None:
        self.info = OpInfo(func)
        self.name = str(func)
        self.asks = any(tag in func.tags for tag in _TELLS_THE_HOST)
        self.signatures: dict[Any, int] = {}
        """By the shapes that come in and go out."""


@final
class _Call:
    """A module whose forward runs."""

    __slots__ = ("call", "module", "name", "op")

    def __init__(self, name: str, module: str, call: int) -> None:
        self.name, self.module, self.call, self.op = name, module, call, 0

    def within(self, name: str) -> str:
        """What a site calls the module of that name, if this call makes the call of it."""
        if not self.module or not name.startswith(f"{self.name}."):
            return name
        return f"{self.module}{f'[{self.call}]' if self.call else ''}{name[len(self.name) :]}"


@final
class _Forward:
    """What was written down of the forward that runs."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.signatures: list[int] = []
        self.starts: list[int] = [0]
        self.operands: list[int] = []
        self.creators: dict[int, int] = {}
        """The op that created a storage, by the storage's address."""
        self.kept: list[StorageWeakRef] = []
        """As long as these are there no storage has the address of another."""
        self.calls: dict[str, int] = {}
        self.running = [_Call("", "", 0)]
        self.embedding: Floats | None = None
        self.state: Callable[[], torch.Tensor | None] = lambda: None
        """The last hidden state that a module was given, as long as it is there."""
        self.hidden: list[Floats] = []
        self.asked_at: list[int] = []

    @property
    def asked(self) -> int:
        """How many numbers have been handed to the host, and an op has followed; -1 before the sample is embedded."""
        if self.embedding is None:
            return -1
        return len(self.asked_at) - (bool(self.asked_at) and self.asked_at[-1] == len(self.keys) - 1)


@final
class ForwardRecorder:
    """Writes down what forwards do, by the numbers of an architecture. Whoever has the ops hands them over.

    Arguments:
        architecture: Learns the ops and the parameters.
        models: What runs.
        dynamism: What of it embeds a sample.

    Raises UsageError if the models have no module of that name, and ValueError if the architecture knows a parameter of
    that name with another size.
    """

    def __init__(self, architecture: Architecture, models: Sequence[torch.nn.Module], dynamism: Dynamism) -> None:
        self.architecture = architecture
        self._dynamism = dynamism
        self._names: dict[int, str] = {}
        self.parameters: dict[int, torch.Tensor] = {}
        """One of each storage, by its number."""
        storages, statements = set[int](), dict[type, tuple[str, ...]]()
        for place, model in enumerate(models):
            around = f"{place}." if place else ""
            self._names |= {id(module): f"{around}{name}" for name, module in model.named_modules()}
            for name, module in model.named_modules():
                kind = type(module)
                if kind not in statements:
                    own = not kind.__module__.startswith("torch.nn.")
                    statements[kind] = control_statements(kind.forward) if own else ()
                if statements[kind]:
                    architecture.statements[f"{around}{name}"] = statements[kind]
            for name, parameter in model.named_parameters():
                if (address := _address(parameter)) and address not in storages:
                    storages.add(address)
                    nbytes = storage_of(parameter).nbytes()
                    self.parameters[architecture.parameter(ParameterStorage(f"{around}{name}", nbytes))] = parameter
        if dynamism.embedding not in self._names.values():
            raise UsageError(f"The model of {architecture.network} has no module {dynamism.embedding!r} that embeds.")
        self._ops: dict[Any, _Op] = {}
        self._numbers: dict[Any, int] = {}
        self._touched: dict[int, int] = {}
        self._thread = 0
        self.forward = _Forward()
        """The one that runs, or ran last."""

    @property
    def in_module(self) -> bool:
        """Whether a module's forward runs."""
        return len(self.forward.running) > 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A forward of this thread begins. Within, modules tell which of them runs."""
        self.forward = _Forward()
        self._thread = get_ident()
        self._touched = {_address(parameter): number for number, parameter in self.parameters.items()}
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            yield

    @unheard_by_modes
    @unheard
    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if get_ident() != self._thread:
            return
        forward = self.forward
        name = self._names.get(id(module), forward.running[-1].name)
        place = forward.running[-1].within(name)
        call = forward.calls.get(place, 0)
        forward.calls[place] = call + 1
        forward.running.append(_Call(name, place, call))
        if forward.embedding is not None and args and isinstance(args[0], torch.Tensor):
            with suppress(RuntimeError):  # nested tensors have no shape
                shape = args[0].shape
                if shape and shape[-1] == len(forward.embedding) and args[0].is_floating_point():
                    forward.state = weakref.ref(args[0])

    @unheard_by_modes
    @unheard
    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        forward = self.forward
        if get_ident() != self._thread:
            return
        if forward.embedding is None and forward.running[-1].name == self._dynamism.embedding:
            with suppress(Exception):  # nobody reads what torch.func wraps, for one: such a forward is not learned
                forward.embedding = _mean(next(iter(tensors_of(result)), None))
        if len(forward.running) > 1:
            forward.running.pop()

    def before(self, func: Any, args: Any, kwargs: Any) -> _Met | None:
        """An op is about to run; None for a view, which is no op."""
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = _Op(func)
        if op.info.view:
            return None
        given = [tensor for _, tensor, _ in operands(op.info, args, kwargs)]
        return _Met(op, args, kwargs, [_address(tensor) for tensor in given], [tensor.shape for tensor in given])

    def after(self, met: _Met, out: Any) -> int:
        """It ran. Returns its number in the architecture."""
        forward, op, number = self.forward, met.op, len(self.forward.keys)
        made = tensors_of(out)
        key = (*met.shapes, None, *(tensor.shape for tensor in made))
        signature = op.signatures.get(key)
        created = 0
        for tensor in made:
            address = _address(tensor)
            if address and address not in met.storages and forward.creators.get(address) != number:
                storage = storage_of(tensor)
                forward.creators[address] = number
                forward.kept.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
                created += storage.nbytes()
        if signature is None:
            dims = np.sum([folded(tuple(shape)) for shape in met.shapes] or [(0, 0, 0)], axis=0)
            signature = op.signatures[key] = self.architecture.signature(
                OpSignature(
                    name=op.name, dims=(int(dims[0]), int(dims[1]), int(dims[2])), created=created,
                    flops=flops_of(op.info, met.args, met.kwargs, out),
                    traffic=traffic_of(op.info, met.args, met.kwargs, out),
                )
            )  # fmt: skip
        touched = {self._touched[one]: None for one in met.storages if one in self._touched}
        read = {forward.creators[one]: None for one in met.storages if one in forward.creators}
        call = forward.running[-1]
        place = (call.module, call.call, call.op, op.name, *touched)
        number_of_op = self._numbers.get(place)
        if number_of_op is None:
            made_op = PathOp(Site(call.module, call.call, call.op), op.name, (*touched,))
            number_of_op = self._numbers[place] = self.architecture.op(made_op)
        forward.keys.append(number_of_op)
        call.op += 1
        forward.signatures.append(signature)
        forward.operands += read
        forward.starts.append(len(forward.operands))
        if op.asks and forward.embedding is not None:
            state = forward.state()
            forward.hidden.append(forward.embedding if state is None else _mean(state))
            forward.asked_at.append(number)
        return number_of_op


@final
class _Met(NamedTuple):
    """An op that is about to run, its operands by their addresses and shapes."""

    op: _Op
    args: Any
    kwargs: Any
    storages: list[int]
    shapes: list[torch.Size]


def _address(tensor: torch.Tensor) -> int:
    """0 for a tensor without a storage."""
    try:
        return storage_address(tensor)
    except (RuntimeError, TypeError):
        return 0


def _mean(tensor: torch.Tensor | None) -> Floats:
    """Over all but the last dimension."""
    if tensor is None or not tensor.dim():
        return np.zeros(1, np.float32)
    with torch.no_grad(), unwatched():
        leading = list(range(tensor.dim() - 1))
        whole = tensor.detach().real if tensor.is_complex() else tensor.detach()
        whole = whole if whole.is_floating_point() else whole.to(torch.float32)
        found = whole.mean(leading, dtype=torch.float32) if leading else whole.to(torch.float32)
        return np.array(found.cpu().numpy(), np.float32)
