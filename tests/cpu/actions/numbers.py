"""Numbers of other kinds: narrow, complex, sparse, quantized; and what is computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cpu.world import Instruction, World, action

DTYPES = (
    torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.bool, torch.float32, torch.float32, torch.complex32, torch.float8_e4m3fn,
)  # fmt: skip


@action(7)
def convert(world: World, i: Instruction) -> Any:
    x, dtype = world.numbers(i.a, least=1), DTYPES[i.b % len(DTYPES)]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: x.to(dtype),
        lambda: x.detach().to(dtype).clone(),
        lambda: x.type(dtype),
        lambda: torch.zeros_like(x, dtype=dtype).copy_(x.detach()),
        lambda: x.to(dtype, copy=True),
        lambda: x.detach().view(dtype),
        lambda: torch.ones(64, 64, dtype=dtype),
        lambda: torch.randn(64, 32, dtype=dtype, generator=world.generator(i.c)),
        lambda: torch.rand(32, 64, dtype=dtype, requires_grad=dtype.is_floating_point or dtype.is_complex),
        lambda: x.to(torch.get_default_dtype()),
        lambda: x + torch.ones(x.shape, dtype=dtype),
        lambda: x.to(dtype).to(x.dtype),
        lambda: x.half().sum().float(),
        lambda: torch.result_type(x, torch.ones(1, dtype=dtype)) and x.to(dtype).mul(2),
    )
    return calls[i.c % len(calls)]()


@action(6)
def reduce(world: World, i: Instruction) -> Any:
    x = world.numbers(i.a)
    dim = i.b % 2
    calls: tuple[Callable[[], Any], ...] = (
        lambda: x.sum(),
        lambda: x.mean(dim, keepdim=True),
        lambda: x.median(dim),
        lambda: x.mode(dim),
        lambda: x.kthvalue(3, dim),
        lambda: x.cummax(dim),
        lambda: x.logcumsumexp(dim),
        lambda: x.aminmax(dim=dim),
        lambda: torch.std_mean(x, dim),
        lambda: x.quantile(0.3, dim),
        lambda: x.nanmean(dim),
        lambda: x.count_nonzero(dim),
        lambda: x.amax(dim),
        lambda: x.argsort(dim),
        lambda: x.all(dim),
        lambda: x.norm(p=1, dim=dim),
        lambda: x.renorm(2, dim, 1.0),
        lambda: x.diff(dim=dim),
        lambda: x.cumprod(dim),
        lambda: x.trace(),
        lambda: x.msort(),
        lambda: torch.trapezoid(x, dim=dim),
        lambda: torch.corrcoef(x[:16]),
        lambda: torch.cov(x[:16]),
        lambda: x.softmax(dim, dtype=torch.float64),
        lambda: F.softmin(x, dim),
        lambda: x.std(),
        lambda: x.dist(world.like(i.c, x)),
        lambda: torch.renorm(x, 1, 0, 5.0).nan_to_num_(),
        lambda: x.cummin(dim),
        lambda: x.nansum(dim),
        lambda: x.sum(dim, dtype=torch.float64),
        lambda: (x.min(), x.max()),
    )
    return calls[i.c % len(calls)]()


@action(5)
def elements(world: World, i: Instruction) -> Any:
    """Element by element, less usual functions."""
    x = world.numbers(i.a, least=0)
    y = world.like(i.b, x)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: x.erf(), lambda: x.lgamma(), lambda: x.digamma(), lambda: x.expm1(), lambda: x.log1p(),
        lambda: x.sinc(), lambda: torch.xlogy(x, y), lambda: torch.special.i0(x), lambda: x.logit(0.1),
        lambda: x.trunc(), lambda: x.frac(), lambda: x.fmod(y), lambda: x.remainder(0.7), lambda: x.copysign(y),
        lambda: x.nextafter(y), lambda: x.heaviside(y), lambda: x.logaddexp(y), lambda: x.float_power(2),
        lambda: x.pow(3), lambda: 2**x, lambda: x.rsqrt(), lambda: x.reciprocal(), lambda: x.sgn(),
        lambda: x.nan_to_num(), lambda: x.clamp(min=y), lambda: torch.addcdiv(x, y, y.abs() + 1), lambda: x.frexp(),
        lambda: x.round(decimals=1), lambda: x.ldexp(y), lambda: x.mish() if False else F.mish(x), lambda: F.celu(x),
        lambda: F.hardswish(x), lambda: F.softplus(x), lambda: F.logsigmoid(x), lambda: F.glu(x),
        lambda: F.elu_(x.clone()),
        lambda: F.prelu(x, torch.tensor(0.2)), lambda: F.hardshrink(x), lambda: F.tanhshrink(x), lambda: F.relu6(x),
        lambda: F.threshold(x, 0.1, 0.2), lambda: x.bitwise_not(), lambda: x.logical_xor(y), lambda: x.isclose(y),
        lambda: torch.polar(x.abs(), y), lambda: torch.complex(x, y), lambda: x.angle(), lambda: x.erfinv(),
        lambda: torch.special.xlog1py(x, y), lambda: torch.lerp(x, y, x), lambda: x.addr(x[0], x[0]),
        lambda: F.gelu(x, approximate="tanh"), lambda: F.selu(x), lambda: torch.rsub(x, y),
        lambda: torch.igamma(x.abs(), y.abs()),
    )  # fmt: skip
    return calls[i.c % len(calls)]()


def _square(world: World, number: int) -> Tensor:
    """A square matrix with a comfortable diagonal."""
    x = world.pick(
        number,
        lambda t: t.dim() == 2 and t.dtype in (torch.float32, torch.float64, torch.complex64) and min(t.shape) >= 32,
    )
    n = 32 if number % 2 else min(x.shape)
    return x[:n, :n] * 0.1 + torch.eye(n, dtype=x.dtype) * 3


@action(6)
def linear_algebra(world: World, i: Instruction) -> Any:
    x, m = world.floats(i.a), _square(world, i.a)
    b = _square(world, i.b)
    b = b if b.shape == m.shape and b.dtype == m.dtype else torch.ones_like(m)
    spd = m @ m.mH + torch.eye(len(m), dtype=m.dtype)
    L = torch.linalg
    calls: tuple[Callable[[], Any], ...] = (
        lambda: L.qr(x), lambda: L.svd(m, full_matrices=False), lambda: L.eigh(spd), lambda: L.solve(m, b),
        lambda: L.cholesky(spd), lambda: L.cholesky_ex(spd), lambda: L.inv(m), lambda: L.inv_ex(m), lambda: L.det(m),
        lambda: L.slogdet(m), lambda: L.lu_factor(m), lambda: L.lu(m), lambda: torch.lu_solve(b, *L.lu_factor(m)),
        lambda: L.solve_triangular(m.tril(), b, upper=False), lambda: L.matrix_power(m, 3),
        lambda: L.multi_dot([m, b, m]), lambda: L.eig(m), lambda: L.norm(m), lambda: L.matrix_norm(m, "nuc") * 0 + 1,
        lambda: torch.kron(m[:8, :8], b[:8, :8]), lambda: torch.cross(x[:, :3], x[:, 3:6], dim=1),
        lambda: torch.tensordot(m, b, dims=1), lambda: torch.cholesky_solve(b, L.cholesky(spd)),
        lambda: torch.cholesky_inverse(L.cholesky(spd.detach())), lambda: L.lstsq(m, b, driver="gelsd").solution,
        lambda: L.pinv(m) if not m.is_complex() else L.inv(m),
        lambda: L.householder_product(*torch.geqrf(m)), lambda: torch.linalg.tensorinv(m.view(*m.shape), ind=1),
        lambda: L.vecdot(m, b), lambda: torch.baddbmm(m[None], m[None], b[None]), lambda: torch.chain_matmul(m, b),
        lambda: L.ldl_factor(spd), lambda: torch.triangular_solve(b, m.triu()), lambda: torch.mv(m, b[0]),
        lambda: torch.outer(m[0], b[0]), lambda: L.svd(x[:, :16])[1], lambda: torch.svd_lowrank(m.detach(), 4)[1],
        lambda: torch.pca_lowrank(m.detach(), 4)[1], lambda: torch.lobpcg(spd.detach(), k=2, niter=5)[0],
        lambda: torch.addbmm(m, m[None], b[None]), lambda: torch.addmv(m[0], m, b[0]), lambda: L.qr(m, mode="r"),
        lambda: m.detach().clone().addbmm_(m[None], b[None]), lambda: torch.trapz(m), lambda: torch.inner(m, b),
        lambda: L.matrix_exp(m * 0.1), lambda: L.eigvalsh(spd),
        lambda: L.svdvals(m), lambda: L.cond(m),
        lambda: L.matrix_norm(m, 2), lambda: L.pinv(m),
        lambda: L.matrix_rank(m), lambda: L.vander(m[0][:8]), lambda: torch.logdet(spd), lambda: L.vector_norm(m, 3),
    )  # fmt: skip
    return calls[i.c % len(calls)]()


@action(5)
def fourier(world: World, i: Instruction) -> Any:
    x = world.pick(i.a, lambda t: (t.is_floating_point() or t.is_complex()) and t.dim() == 2 and t.numel() > 0)
    x = x if x.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128) else x.float()
    real = x.real if x.is_complex() else x
    ft = torch.fft
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ft.fft(x), lambda: ft.ifft(x), lambda: ft.rfft(real), lambda: ft.irfft(ft.rfft(real)),
        lambda: ft.fft2(x), lambda: ft.ifft2(x).conj(), lambda: ft.rfftn(real), lambda: ft.hfft(x),
        lambda: ft.ihfft(real),
        lambda: ft.fftshift(x), lambda: ft.fftn(x).mH, lambda: ft.irfftn(ft.rfftn(real) * 0.5),
        lambda: torch.stft(real[0].repeat(8), 32, window=torch.hann_window(32, dtype=real.dtype), return_complex=True),
        lambda: torch.istft(
            torch.stft(real[0].repeat(8), 32, window=torch.ones(32, dtype=real.dtype), return_complex=True), 32,
            window=torch.ones(32, dtype=real.dtype),
        ),
        lambda: ft.fft(x).abs().pow(2), lambda: (ft.rfft(real).conj() * ft.rfft(real)).imag,
        lambda: ft.rfft(real).detach().conj().imag.mul_(2), lambda: torch.view_as_real(ft.fft(x)).sum(-1),
        lambda: torch.view_as_real(ft.fft(x).detach()).mul_(0.5), lambda: ft.fft(x, n=48), lambda: ft.fft(x, dim=0),
        lambda: ft.fft(x).mul_(2j), lambda: ft.fft(x).t().conj()[:4], lambda: ft.fftfreq(500),
        lambda: ft.fft(x).angle(),
        lambda: ft.fft(x).conj_physical(), lambda: ft.fft(x).real.neg(),
        lambda: ft.fft(x).detach().conj().view(-1)[::2],
        lambda: torch.nn.functional.relu(ft.fft(x).imag), lambda: ft.fft(x).detach().mH.contiguous(),
        lambda: torch._neg_view(x.detach()), lambda: torch._neg_view(x.detach()).add_(1),
        lambda: x.detach().to(torch.complex64).conj().copy_(ft.fft(x.detach())),
        lambda: x.detach().to(torch.complex64).conj().mul_(1j).imag, lambda: ft.fft(x).requires_grad_(),
    )  # fmt: skip
    return calls[i.c % len(calls)]()


@action(5)
def sparse(world: World, i: Instruction) -> Any:
    x = world.pick(i.a, lambda t: t.dtype in (torch.float32, torch.float64) and t.dim() == 2 and t.numel() > 0)
    still = x.detach()
    rows, columns = x.shape
    where = torch.stack([torch.arange(24) * 7 % rows, torch.arange(24) * 5 % columns])
    coo = torch.sparse_coo_tensor(where, x.flatten()[:24], (rows, columns))
    odd = world.odd[i.b % len(world.odd)] if world.odd else coo
    calls: tuple[Callable[[], Any], ...] = (
        lambda: coo.to_dense(), lambda: coo.coalesce().values(),
        lambda: torch.sparse.mm(coo, x.t()),
        lambda: torch.sparse.sum(coo, 0).to_dense(), lambda: (coo + coo).coalesce().indices(),
        lambda: x.detach().relu().to_sparse().values(),
        lambda: (x * (x > 1)).detach().to_sparse_csr() @ x.t(),
        lambda: world.odd.append(coo.detach()), lambda: world.odd.append(coo.detach().coalesce()),
        lambda: world.odd.append(x.detach().to_sparse_csr()), lambda: odd.to_dense(),
        lambda: odd.detach().mul_(0.5) and None,
        lambda: torch.sparse.softmax(coo.coalesce(), 1).to_dense(),
        lambda: x.detach().sparse_mask(coo.detach().coalesce()).values(),
        lambda: x.detach().to_sparse(layout=torch.sparse_csc).values(), lambda: world.odd.pop(0) and None,
        lambda: torch.sparse.sampled_addmm(x.detach().to_sparse_csr(), still, still.t() @ still).to_dense(),
        lambda: odd.coalesce().to_dense() * 2, lambda: x.detach().clone().add_(coo.detach()),
        lambda: (x * 1).add(coo.detach()),
        lambda: world.odd.append(x.detach().to_sparse()),
        lambda: torch.sparse.addmm(x @ x.t(), coo, x.t()),
        lambda: coo.t().coalesce().values(),
        lambda: world.odd.append(torch.nested.nested_tensor([x.detach()[:3], x.detach()[:5]])),
        lambda: odd.clone().to_dense(), lambda: torch.nested.to_padded_tensor(odd, 0.0),
        lambda: (odd * 2).to_padded_tensor(1.0),
        lambda: torch.nested.nested_tensor([x.detach()[:3], x.detach()[:7]], layout=torch.jagged).values(),
        lambda: torch.nested.as_nested_tensor([x[:3], x[:7]], layout=torch.jagged).to_padded_tensor(0.0),
    )  # fmt: skip
    made = calls[i.c % len(calls)]()
    del world.odd[:-4]
    return made


@action(3)
def quantized(world: World, i: Instruction) -> Any:
    x = world.floats(i.a).detach().float()
    q = torch.quantize_per_tensor(x, 0.05, 3, torch.qint8)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: q.dequantize(), lambda: q, lambda: q.int_repr(), lambda: q.clone().t().dequantize(),
        lambda: torch.quantize_per_channel(x, x[:, 0].abs() + 0.1, torch.zeros(len(x)), 0, torch.qint8).dequantize(),
        lambda: torch.fake_quantize_per_tensor_affine(world.floats(i.a), 0.1, 0, -128, 127),
        lambda: world.pick(i.b, lambda t: t.is_quantized).dequantize(),
        lambda: x.to(torch.float8_e5m2).to(torch.float32),
        lambda: torch.quantize_per_tensor_dynamic(x, torch.quint8, False).dequantize(),
    )  # fmt: skip
    return calls[i.c % len(calls)]()


@action(7)
def data_dependent(world: World, i: Instruction) -> Any:
    """Sizes that only the content tells."""
    x = world.numbers(i.a)
    flat = x.detach().flatten()[:4096]
    whole = flat.abs().mul(4).nan_to_num(0, 9, 0).clamp(max=63).long() if not flat.is_complex() else torch.arange(64)
    count = int(whole[:50].sum()) % 64 + 1
    calls: tuple[Callable[[], Any], ...] = (
        lambda: torch.unique(whole, return_inverse=True, return_counts=True), lambda: torch.unique_consecutive(whole),
        lambda: torch.unique(x.detach().round(), dim=0), lambda: torch.argwhere(x.detach() > 1),
        lambda: x[x.detach() > 0.3] * 2,
        lambda: x.nonzero(as_tuple=True), lambda: x.topk(count % min(x.shape) + 1), lambda: x[:count],
        lambda: x.narrow(0, 0, count % len(x) + 1).clone(),
        lambda: x.split([count % len(x), len(x) - count % len(x)]),
        lambda: torch.bucketize(x.detach(), torch.linspace(-1, 1, 9)),
        lambda: torch.searchsorted(flat.sort()[0], flat[:900].contiguous()),
        lambda: torch.repeat_interleave(flat[:64], whole[:64] % 5),
        lambda: torch.nn.utils.rnn.pad_sequence([x[: n % len(x) + 1] for n in whole[:4].tolist()], batch_first=True),
        lambda: torch.bincount(whole, minlength=count), lambda: F.one_hot(whole[:99]),
        lambda: x.masked_fill(x.detach() > 0, 0)[x.detach().sum(1) > 0],
        lambda: torch.zeros(count, 64).index_add_(0, whole[:64] % count, torch.ones(64, 64)),
        lambda: torch.histogram(x.detach().float().cpu(), 20),
        lambda: x.detach()[whole[:64] % len(x)].unique(), lambda: torch.isin(whole, whole[:7]).nonzero(),
        lambda: x.detach().sort(stable=True)[0].unique_consecutive()[:4000],
        lambda: torch.cat([x] * (count % 3 + 1)), lambda: torch.ones(count, count) @ torch.ones(count, 32),
        lambda: x.repeat(1, count % 3 + 1),
        lambda: torch.masked_select(x, x.detach() > x.detach().mean()),
        lambda: torch.tensor_split(x, whole[:3].sort()[0]), lambda: x.unfold(0, count % len(x) + 1, 4),
    )  # fmt: skip
    return calls[i.c % len(calls)]()


@action(6)
def by_index(world: World, i: Instruction) -> Any:
    """Reads and writes through indices, with accumulation."""
    x = world.numbers(i.a)
    rows, columns = x.shape[0], x.shape[1]
    index = torch.arange(40) * (i.b % 7 + 1) % rows
    where = (torch.arange(rows * columns) * 3 % rows).view(rows, columns)
    y = x.detach().clone()
    into = x if i.b % 3 == 0 and not x.requires_grad else y
    calls: tuple[Callable[[], Any], ...] = (
        lambda: into.index_put_((index,), x[:1].detach().expand(40, *x.shape[1:]), accumulate=True),
        lambda: into.index_put_((index, index % columns), x.new_ones(40), accumulate=True),
        lambda: x.index_put((index,), x[:1].expand(40, *x.shape[1:]), accumulate=True),
        lambda: x.index_put((x.detach() > 0,), x.new_tensor(0.5)),
        lambda: into.index_put_((x.detach() > 0,), x.new_tensor(1), accumulate=True),
        lambda: into.scatter_add_(0, where, x.detach()), lambda: x.scatter_add(0, where, x),
        lambda: x.scatter(0, where, x),
        lambda: x.scatter_reduce(0, where, x, "mean"), lambda: into.scatter_reduce_(0, where, x.detach(), "amax"),
        lambda: x.gather(0, where),
        lambda: x.take(index), lambda: into.put_(index, x.new_ones(40), accumulate=True),
        lambda: into.index_copy_(0, torch.arange(3), y[3:6]),
        lambda: x.index_add(0, index, x[index], alpha=0.5), lambda: into.masked_scatter_(y > 0, y.flatten()),
        lambda: x.take_along_dim(where, 0),
        lambda: x[index][:, index % columns], lambda: x[None, :, index % columns], lambda: x[..., 0],
        lambda: x[index.tolist()],
        lambda: x.index_fill(0, index, 0.5),
        lambda: into.index_reduce_(0, index % 3, y[:40] if rows >= 40 else y[index], "prod"),
        lambda: into.fill_diagonal_(1),
        lambda: F.embedding(index, x), lambda: F.embedding(index, x.detach(), max_norm=1.0),
        lambda: F.embedding(index, x, padding_idx=1, scale_grad_by_freq=True),
        lambda: F.embedding_bag(index, x, torch.arange(0, 40, 8), mode=("sum", "mean", "max")[i.b % 3]),
        lambda: F.embedding(index, x, sparse=True),
        lambda: into.__setitem__((slice(None), index % columns), 0.25), lambda: into.__setitem__(y > 1, y[0, 0]),
        lambda: into[1].add_(into[0]),
        lambda: into.view(-1)[1:].copy_(into.view(-1)[:-1].clone()), lambda: torch.index_select(x, 1, index % columns),
        lambda: x[index, index % columns] * 2,
        lambda: F.embedding_bag(index.view(5, 8), x, sparse=True, mode="sum"),
    )  # fmt: skip
    return calls[i.c % len(calls)]()
