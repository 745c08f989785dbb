"""Steps of a dynamic network, each written down as the path that its forward took, at little cost an op.

Only the forward is watched: the backward and the optimizer run as they always do. What a whole step does, with the
lifetimes of storages, is for `recorder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spillway.engines.tensors.calls import operands
from spillway.engines.tensors.cpu_machine import tensors_of
from spillway.engines.tensors.ops import OpInfo
from spillway.errors import UsageError
from spillway.internals.dispatch_key import unwatched
from spillway.internals.private import unheard
from spillway.pilots.architecture import Architecture, control_statements
from spillway.pilots.idioms import folded
from spillway.pilots.paths import Dynamism, Floats, OpSignature, ParameterStorage, PathOp, Sample, Site
from spillway.recording.formulas import flops_of, traffic_of
from spillway.recording.recorder import arriving
from spillway.recording.steps import Trainable

_TELLS_THE_HOST: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""After ops with these tags the host knows what tensors hold, so that what follows may depend on it."""


class Dynamic(Trainable, Protocol):
    """A workload that says what is dynamic about it."""

    @property
    def loss(self) -> Callable[[Any, Any], torch.Tensor]:
        """Of the model and a batch."""

    @property
    def dynamism(self) -> Dynamism | None:
        """What a pilot has to be told."""


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
        self.state: torch.Tensor | None = None
        """The last hidden state that a module was given."""
        self.hidden: list[Floats] = []
        self.asked_at: list[int] = []


@final
class PathRecorder:
    """Writes down what the forwards of one network do, by the numbers of its architecture.

    Raises UsageError for a workload that does not say what is dynamic about it, or names no module of the model.
    """

    def __init__(self, workload: Dynamic) -> None:
        if workload.dynamism is None:
            raise UsageError(
                f"The workload {workload.name} does the same for every sample: there is no path to record."
            )
        self.architecture = Architecture(workload.name, workload.dynamism.base)
        """What was seen so far."""
        self._workload, self._dynamism = workload, workload.dynamism
        self._names = {id(module): name for name, module in workload.model.named_modules()}
        if self._dynamism.embedding not in self._names.values():
            raise UsageError(f"The model of {workload.name} has no module {self._dynamism.embedding!r} that embeds.")
        for name, module in workload.model.named_modules():
            own = not type(module).__module__.startswith("torch.nn.")
            if own and (found := control_statements(type(module).forward)):
                self.architecture.statements[name] = found
        self._parameters: dict[int, int] = {}
        for name, parameter in workload.model.named_parameters():
            storage = parameter.untyped_storage()
            if storage._cdata not in self._parameters:
                number = self.architecture.parameter(ParameterStorage(name, storage.nbytes()))
                self._parameters[storage._cdata] = number
        self._ops: dict[Any, _Op] = {}
        self._numbers: dict[Any, int] = {}
        self._forward = _Forward()
        self._steps = 0

    def sample(self, batch: Any, *, update: bool = True) -> Sample:
        """One step of the network, and what it did.

        Arguments:
            update: Whether the backward and the optimizers run after the forward.
        """
        model, forward = self._workload.model, _Forward()
        self._forward = forward
        with self._watched():
            loss = self._workload.loss(model, batch)
        if update:
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in self._workload.optimizers:
                optimizer.step()
            for optimizer in self._workload.optimizers:
                optimizer.zero_grad()
        self._steps += 1
        if forward.embedding is None:
            raise UsageError(f"The forward of {self._workload.name} did not call {self._dynamism.embedding!r}.")
        width = len(forward.embedding)
        return Sample(
            step=self._steps - 1, sizes=self._dynamism.sizes(batch), embedding=forward.embedding,
            base=self._dynamism.base, path=self.architecture.path(forward.keys, forward.starts, forward.operands),
            signatures=np.array(forward.signatures, np.int32), asked_at=np.array(forward.asked_at, np.int32),
            hidden=np.array(forward.hidden, np.float32).reshape(-1, width), loss=float(loss.detach()),
        )  # fmt: skip

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(arriving(self._handle))
            yield

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        forward = self._forward
        name = self._names.get(id(module), forward.running[-1].name)
        place = forward.running[-1].within(name)
        call = forward.calls.get(place, 0)
        forward.calls[place] = call + 1
        forward.running.append(_Call(name, place, call))
        if forward.embedding is not None and args and isinstance(args[0], torch.Tensor):
            shape = args[0].shape
            if shape and shape[-1] == len(forward.embedding) and args[0].is_floating_point():
                forward.state = args[0]

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        forward = self._forward
        if forward.embedding is None and forward.running[-1].name == self._dynamism.embedding:
            forward.embedding = _mean(tensors_of(result)[0])
        if len(forward.running) > 1:
            forward.running.pop()

    @unheard
    def _handle(self, _: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = _Op(func)
        kwargs = kwargs or {}
        if op.info.view:
            return func(*args, **kwargs)
        given = [tensor for _, tensor, _ in operands(op.info, args, kwargs)]
        storages = [tensor.untyped_storage()._cdata for tensor in given]
        shapes = [tensor.shape for tensor in given]
        out = func(*args, **kwargs)
        self._write_down(op, args, kwargs, storages, shapes, out)
        return out

    def _write_down(
        self, op: _Op, args: Any, kwargs: Any, storages: list[int], shapes: list[torch.Size], out: Any
    ) -> None:
        forward, number = self._forward, len(self._forward.keys)
        made = tensors_of(out)
        key = (*shapes, None, *(tensor.shape for tensor in made))
        signature = op.signatures.get(key)
        created = 0
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages and forward.creators.get(storage._cdata) != number:
                forward.creators[storage._cdata] = number
                forward.kept.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
                created += storage.nbytes()
        if signature is None:
            dims = np.sum([folded(tuple(shape)) for shape in shapes] or [(0, 0, 0)], axis=0)
            signature = op.signatures[key] = self.architecture.signature(
                OpSignature(
                    name=op.name, dims=(int(dims[0]), int(dims[1]), int(dims[2])), created=created,
                    flops=flops_of(op.info, args, kwargs, out), traffic=traffic_of(op.info, args, kwargs, out),
                )
            )  # fmt: skip
        touched = {self._parameters[one]: None for one in storages if one in self._parameters}
        read = {forward.creators[one]: None for one in storages if one in forward.creators}
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
            forward.hidden.append(forward.embedding if forward.state is None else _mean(forward.state))
            forward.asked_at.append(number)


def _mean(tensor: torch.Tensor) -> Floats:
    with torch.no_grad(), unwatched():
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        return np.array(flat.mean(0, dtype=torch.float32).cpu().numpy(), np.float32)
