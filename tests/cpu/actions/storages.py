"""Tensors that get another storage or size, live on from step to step, or are written as `out=`."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from spillway.errors import SpillwayError
from tests.cpu.world import Instruction, World, action


def _swapped(x: Tensor, y: Tensor) -> None:
    """Torch counts who has them, garbage as well."""
    gc.collect()
    torch.utils.swap_tensors(x, y)


def _strangers(world: World, number: int) -> Tensor:
    """A tensor that no graph holds: its storage may be changed. It has bytes for all its elements, and may be written
    (else torch would give it a size, and the error comes before its content). Torch crashes where shared memory grows.
    """

    def fits(t: Tensor) -> bool:
        free = not t.requires_grad and not t.is_inference() and t._base is None and not t.is_shared()
        return free and t.numel() > 0 and _has_bytes(t)

    return world.pick(number, fits)


def _has_bytes(t: Tensor) -> bool:
    """Whether its storage has bytes for all its elements."""
    return t.numel() * t.element_size() <= t.untyped_storage().nbytes()


@action(4)
def carry(world: World, i: Instruction) -> None:
    """A piece of a tensor lives on, longer than what is only named."""
    x = world.numbers(i.a, least=1)
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: x[0],
        lambda: x.detach()[-1],
        lambda: x.sum(),
        lambda: x.detach().abs().max(),
        lambda: x[: len(x) // 2],
        lambda: x.detach().clone()[1:],
        lambda: x.t() if x.dim() == 2 else x,
        lambda: x.detach().flatten()[3],
        lambda: x,
        lambda: x.mean(0),
    )
    world.kept.append(calls[i.b % len(calls)]())
    del world.kept[: max(len(world.kept) - 6, 0)]


@action(4)
def carried(world: World, i: Instruction) -> Any:
    """What was carried is used, and written: an average, a counter, a memory bank, a state."""
    if not world.kept:
        return None
    place = i.a % len(world.kept)
    k = world.kept[place]
    x = world.numbers(i.b, least=0)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: k.mul_(0.9).add_(x.detach().mean(), alpha=0.1),
        lambda: k * x.flatten()[: k.numel()].view(k.shape),
        lambda: k.detach_(),
        lambda: k.copy_(x.detach().flatten()[: k.numel()].view(k.shape)),
        lambda: world.kept.__setitem__(place, k * 0.5 + x.detach().mean()),
        lambda: world.kept.__setitem__(place, k.detach()),
        lambda: k.sum().backward(),
        lambda: (k + x.mean(), world.note("kept", float(k.detach().abs().float().sum()))),
        lambda: world.kept.__setitem__(place, torch.cat([k.detach().flatten(), x.detach().flatten()])[-2048:]),
        lambda: k.view(-1)[0:1].fill_(0.25),
        lambda: world.kept.pop(place),
    )
    with torch.set_grad_enabled(i.c % 4 != 0):
        made = calls[i.c // 4 % len(calls)]()
    return made if isinstance(made, Tensor) else None


@action(5)
def another_storage(world: World, i: Instruction) -> Any:
    """What a tensor's bytes are changes: their number, or where they are."""
    x, y = _strangers(world, i.a), _strangers(world, i.b)
    world.aliases.clear()  # of memory that is given another size plain PyTorch leaves them nothing
    n = x.numel()
    parameter = list(world.network.parameters())[i.a % 6]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: x.resize_(max(n // 2, 1)),
        lambda: x.resize_(n * 2)[n:].fill_(0),  # `zero_` is not there for quantized tensors
        lambda: x.resize_(n // 4, 2),
        lambda: x.resize_as_(y).fill_(0),
        lambda: _emptied_and_back(x),
        lambda: _emptied_and_back(parameter),
        lambda: x.set_(y),
        lambda: x.set_(y.untyped_storage(), 0, (min(n, y.numel()),)) if x.dtype == y.dtype else None,
        lambda: (
            x.set_(y.detach(), 1, (4, 4), (4, 1))
            if y.untyped_storage().nbytes() >= (y.storage_offset() + 17) * x.element_size()
            else None
        ),
        lambda: x.set_(),
        lambda: setattr(x, "data", y),
        lambda: setattr(x, "data", x.data[: max(len(x) // 2, 1)]),
        lambda: setattr(parameter, "data", parameter.data.clone()),
        lambda: setattr(parameter, "data", parameter.data.t().contiguous().t() if parameter.dim() == 2 else parameter),
        lambda: x.untyped_storage().fill_(0),
        lambda: x.untyped_storage().copy_(y.untyped_storage()),
        lambda: world.note("byte", x.untyped_storage()[1], len(x.untyped_storage())),
        lambda: torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone(), 0, (n // 2,)),
        lambda: _swapped(x, y),
        lambda: x.untyped_storage().resize_(x.untyped_storage().nbytes() + 64),
        lambda: torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride()),
        lambda: x.swapdims_(0, -1).unsqueeze_(0).squeeze_(0),
        lambda: world.kept.append(torch.empty(0, dtype=x.dtype).set_(x)),
    )
    with torch.no_grad(), _bytes_for_all_elements(x):
        made = calls[i.c % len(calls)]()
    return made if isinstance(made, Tensor) and made is not x else None


@contextlib.contextmanager
def _bytes_for_all_elements(t: Tensor) -> Iterator[None]:
    """What is NumPy's is given another size and no more bytes, with an error: it gets its own size back."""
    geometry = t.storage_offset(), t.shape, t.stride()
    try:
        yield
    except Exception:
        if not _has_bytes(t):
            t.set_(t.untyped_storage(), *geometry)
        raise


def _emptied_and_back(x: Tensor) -> None:
    """As sharded training frees what it has gathered."""
    storage = x.untyped_storage()
    nbytes = storage.nbytes()
    whole = nbytes == x.numel() * x.element_size() and x.storage_offset() == 0 and x.is_contiguous()
    if not whole or storage.is_shared():
        return
    content = x.detach().clone()
    storage.resize_(0)
    storage.resize_(nbytes)
    x.detach().copy_(content)


@action(3)
def copied(world: World, i: Instruction) -> Any:
    """Through files, pickles and copies, what shares a storage among it."""
    x = world.numbers(i.a, least=1).detach()
    pair = [x, x[:1], x.t() if x.dim() == 2 else x.flatten()]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: copy.deepcopy(pair),
        lambda: pickle.loads(pickle.dumps(pair)),
        lambda: _through_file(pair),
        lambda: copy.copy(x),
        lambda: [torch.nn.Parameter(x.clone()) if x.is_floating_point() else x],
        lambda: torch.as_tensor(x),
        lambda: torch.tensor(x.flatten()[:40].tolist()),
        lambda: x.new_tensor([[1.0, 2.0]]).expand(64, 2).contiguous(),
        lambda: x.new_zeros(40, 40).copy_(x.flatten()[0]),
        lambda: [x.share_memory_()] if i.b % 4 == 0 else [x.clone().share_memory_().mul_(2)],
        lambda: torch.frombuffer(bytearray(4096), dtype=torch.float32).add_(x.flatten()[0].float()),
    )
    return calls[i.c % len(calls)]()


def _through_file(tensors: list[Tensor]) -> Any:
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return torch.load(file)


@action(4)
def shapes(world: World, i: Instruction) -> Any:
    """Memory formats, and ways to arrange elements."""
    x = world.numbers(i.a)
    image = x.unflatten(0, (2, -1)).unsqueeze(0) if x.dim() == 2 else x
    calls: tuple[Callable[[], Any], ...] = (
        lambda: image.to(memory_format=torch.channels_last),
        lambda: image.contiguous(memory_format=torch.channels_last) * 2,
        lambda: torch.nn.functional.conv2d(image.to(memory_format=torch.channels_last), torch.ones(2, 2, 3, 3) / 9),
        lambda: torch.empty_like(image.to(memory_format=torch.channels_last)).copy_(image),
        lambda: torch.block_diag(x[:16], x[:16, :8]),
        lambda: x.rot90(),
        lambda: torch.meshgrid(x[0], x[0][:16], indexing="ij"),
        lambda: torch.broadcast_tensors(x[:1], x),
        lambda: x.tile(1, 2),
        lambda: torch.atleast_3d(x),
        lambda: x.tensor_split(3, 1),
        lambda: torch.hstack([x, x]),
        lambda: torch.dstack([x, x])[0],
        lambda: torch.column_stack([x, x]),
        lambda: x.unflatten(1, (2, -1)).flatten(0, 1),
        lambda: x.permute(1, 0)[::2, ::3],
        lambda: x.squeeze().unsqueeze(-1).mT,
        lambda: x.expand(2, *x.shape)[1],
        lambda: x.T.reshape(-1),
        lambda: x.ravel()[4:].view(-1)[::2],
        lambda: x.diag_embed()[:2] if len(x) <= 32 else x.diag(),
        lambda: torch.select_scatter(x, x[0], 0, 1),
        lambda: torch.slice_scatter(x, x[:4], 0, 2, 6),
        lambda: torch.diagonal_scatter(x[:32, :32], x[0, :32]),
        lambda: torch.as_strided_copy(x, (8, 8), (2, 1)),
        lambda: torch.vander(x[0][:16], 4),
        lambda: torch.combinations(x[0][:24]),
        lambda: torch.cartesian_prod(x[0][:16], x[0][:16]),
    )
    return calls[i.c % len(calls)]()


@action(5)
def out(world: World, i: Instruction) -> Any:
    """Results written where the caller says: of the right size, of another, or a view of something."""
    x = world.floats(i.a).detach()
    y = world.like(i.b, x).detach()
    world.aliases.clear()
    targets: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.empty(0, dtype=x.dtype),
        lambda: torch.zeros_like(x),
        lambda: torch.zeros(2, *x.shape, dtype=x.dtype)[1],
        lambda: _strangers(world, i.b),
        lambda: y.clone() if y.is_shared() else y,
    )
    target = targets[i.b % len(targets)]()
    numbers = torch.empty(0, dtype=torch.long)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: torch.add(x, y, out=target),
        lambda: torch.mm(x, y.t(), out=target),
        lambda: torch.cat([x, y], out=target),
        lambda: torch.stack([x, y], out=target),
        lambda: torch.sum(x, 0, out=target),
        lambda: torch.mean(x, 1, out=target),
        lambda: torch.max(x, 0, out=(target, numbers)),
        lambda: torch.sort(x, 0, out=(target, numbers)),
        lambda: torch.topk(x, 4, out=(target, numbers)),
        lambda: torch.linspace(0, 1, 1000, out=target),
        lambda: torch.randn(40, 40, out=target, generator=world.generator(i.a)),
        lambda: torch.randperm(1500, out=numbers, generator=world.generator(i.a)),
        lambda: torch.index_select(x, 0, torch.arange(8), out=target),
        lambda: torch.gather(x, 0, torch.zeros(4, x.shape[1], dtype=torch.long), out=target),
        lambda: torch.exp(x, out=target),
        lambda: torch.where(x > 0, x, y, out=target),
        lambda: torch.addmm(x[:, :8] @ x[:, :8].t(), x, y.t(), out=target),
        lambda: torch.cumsum(x, 0, out=target),
        lambda: torch.linalg.qr(x, out=(target, torch.empty(0, dtype=x.dtype))),
        lambda: torch.nonzero(x, out=numbers),
        lambda: torch.masked_select(x, x > 0, out=target),
        lambda: torch.bmm(x[None], y.t()[None], out=target),
        lambda: torch.var_mean(x, 0),
        lambda: torch.full((30, 50), 2.0, out=target),
        lambda: torch.zeros(20, 60, out=target),
        lambda: torch.arange(0, 2000, 2, out=target),
        lambda: torch.take(x, torch.arange(900), out=target),
        lambda: torch.einsum("ij,kj->ik", x, y),
        lambda: torch.clamp(x, -1, 1, out=target),
        lambda: torch.fft.rfft(x, out=torch.empty(0, dtype=torch.complex64)),
        lambda: torch.eye(40, out=target),
        lambda: torch.tril(x, out=target),
        lambda: torch.logsumexp(x, 0, out=target),
        lambda: torch.norm(x, dim=0, out=target),
    )
    with torch.no_grad():
        try:
            with _bytes_for_all_elements(target):
                made = calls[i.c % len(calls)]()
        except SpillwayError:
            raise
        except Exception:
            target.zero_()  # it may have been given a size and no content
            raise
    return made if i.b % 2 else None
