"""What ops get of a device by their shape, how that is found from measured ops, and how far it is to be trusted."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from spillway.costs import DEVICES, PUBLISHED, Device, Efficiency, OpKind, Share, kind_of, read_device, write_device
from spillway.costs.fitting import Timed, fit, leave_one_out, spread_of
from spillway.costs.roofline import Work, paced, seconds_of, timed, work_of
from spillway.errors import UsageError
from spillway.ir import Kind, Op, Phase, Step, StorageInfo, Value
from tests.pure.small_steps import Line, row

DEVICE = Device(
    name="one", flops_per_second=1e12, bytes_per_second=1e15, memory=1, out_per_second=1, in_per_second=1,
    source="made up", op_seconds=0.0, half_flops_per_second=8e12, multiprocessors=10,
)  # fmt: skip
EVEN = {kind: Share(compute=1.0, memory=1.0, half=0.25) for kind in OpKind}
PLAIN = Efficiency(shares=EVEN)


def seconds(work: Work, by: Efficiency = PLAIN, device: Device = DEVICE) -> float:
    return float(seconds_of([work], replace(device, efficiency=by))[0])


def op(shape: tuple[int, ...], name: str = "aten.convolution.default") -> Op:
    return Op(number=0, name=name, phase=Phase.FORWARD, reads=(), creates=(), flops=8, traffic=8, shape=shape)


# Shapes


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((8, 64, 64, 100, 3, 3, 1, 1), OpKind.WINOGRAD),
        ((8, 64, 64, 100, 3, 3, 1, 2), OpKind.CONVOLUTION),
        ((8, 64, 64, 100, 1, 1, 1, 1), OpKind.CONVOLUTION),
        ((8, 64, 64, 100, 3, 3, 2, 1), OpKind.STRIDED),
        ((8, 64, 64, 100, 3, 3, 2, 64), OpKind.DEPTHWISE),
        ((), OpKind.CONVOLUTION),
    ],
)
def test_a_convolution_is_of_a_kind_by_its_shape(shape: tuple[int, ...], kind: OpKind) -> None:
    assert kind_of(op(shape)) is kind
    assert kind_of(op(shape, "aten.convolution_backward.default")) == f"{kind} backward"


def test_a_convolution_is_a_product_of_places_with_windows() -> None:
    step = Step(storages=(), values=(), ops=())
    work = work_of(step, op((8, 6, 4, 100, 3, 5, 1, 2)))
    assert (work.products, work.rows, work.columns, work.inner, work.window) == (2, 800, 2, 45, 15)


def test_a_depthwise_convolution_is_no_product() -> None:
    assert work_of(Step(storages=(), values=(), ops=()), op((8, 64, 64, 100, 3, 3, 1, 64))).columns == 0


def test_a_product_gets_less_where_it_is_narrow_short_or_small() -> None:
    work = Work(OpKind.MATMUL, 10**12, 0, products=1, rows=1280, columns=64, inner=50)
    assert seconds(work) == pytest.approx(1.0)
    assert seconds(work, replace(PLAIN, columns=64.0)) == pytest.approx(2.0)
    assert seconds(work, replace(PLAIN, inner=150.0)) == pytest.approx(4.0)
    assert seconds(work, replace(PLAIN, waves=1.0)) == pytest.approx(2.0)  # ten blocks for ten multiprocessors
    everywhere = replace(DEVICE, multiprocessors=0)
    assert seconds(work, replace(PLAIN, waves=1.0), everywhere) == pytest.approx(1.0)


def test_a_batch_norm_of_few_channels_moves_its_bytes_more_slowly() -> None:
    work = Work(OpKind.NORM, 0, 10**15, channels=10)
    assert seconds(work, replace(PLAIN, channels=30.0)) == pytest.approx(4.0)


def test_products_of_halves_run_on_tensor_cores() -> None:
    assert seconds(Work(OpKind.MATMUL, 10**12, 0, half=True)) == pytest.approx(0.5)
    assert seconds(Work(OpKind.MATMUL, 10**12, 0, half=True), device=replace(DEVICE, half_flops_per_second=None)) == 1.0


def test_an_op_is_one_of_halves_by_what_it_makes() -> None:
    def step(dtype: str) -> Step:
        made = StorageInfo(id=0, nbytes=8, kind=Kind.ACTIVATION, alive_from=0, alive_until=1, dtype=dtype)
        product = Op(number=0, name="aten.mm.default", phase=Phase.FORWARD, reads=(), creates=(0,), flops=8)
        return Step(storages=(made,), values=(Value(id=0, storage=0, version=0),), ops=(product,))

    assert [work_of(there, there.ops[0]).half for there in map(step, ("float16", "bfloat16", "float32"))] == [
        True, True, False
    ]  # fmt: skip


@pytest.mark.parametrize(("winograd", "expected"), [(2.0, 0.5), (0.5, 1.0)])
def test_the_faster_of_two_ways_to_convolve_is_taken(winograd: float, expected: float) -> None:
    by = replace(PLAIN, shares=EVEN | {OpKind.WINOGRAD: Share(compute=winograd, memory=1.0)})
    work = Work(OpKind.WINOGRAD, 10**12, 0, products=1, rows=1280, columns=64, inner=576, window=9)
    assert seconds(work, by) == pytest.approx(expected)


# The host


def test_a_device_waits_for_launches_and_not_for_those_made_meanwhile() -> None:
    took = paced(numpy.array([1.0, 5.0, 1.0, 1.0]), numpy.array([2.0, 2.0, 2.0, 2.0]))
    # Launched at 2, 4, 6, 8: the third waits for the second op and not for its launch.
    assert took.tolist() == [3.0, 6.0, 1.0, 1.0]


def test_a_step_of_small_ops_takes_what_the_host_takes() -> None:
    slow = replace(DEVICE, host_seconds=1e-3)
    step = timed(row(*(Line(traffic=8) for _ in range(10))), slow)
    assert math.fsum(one.seconds or 0 for one in step.ops) == pytest.approx(10e-3)


# Fits


def made_up(seed: int, count: int = 60) -> list[Work]:
    draw = random.Random(seed)
    products = [
        Work(
            OpKind.MATMUL, 2 * rows * columns * inner, 4 * (rows * inner + inner * columns + rows * columns),
            products=1, rows=rows, columns=columns, inner=inner,
        )
        for rows, columns, inner in (tuple(2 ** draw.randint(4, 11) for _ in range(3)) for _ in range(count))
    ]  # fmt: skip
    return [*products, *(Work(OpKind.ELEMENTWISE, 0, 2 ** draw.randint(10, 30)) for _ in range(count))]


def test_an_efficiency_that_seconds_were_made_from_is_found_again() -> None:
    device = DEVICES["v100"]
    shares = {**PUBLISHED.shares, OpKind.MATMUL: Share(compute=0.6, memory=0.7, launch=1.0)}
    truth = replace(PUBLISHED, shares=shares, columns=40.0)
    groups = [
        Timed(name=f"{seed}", works=works, seconds=seconds_of(works, replace(device, efficiency=truth)).tolist())
        for seed in range(4) if (works := made_up(seed))
    ]  # fmt: skip
    found = fit(groups, device)
    assert found.shares[OpKind.MATMUL].compute == pytest.approx(0.6, rel=0.3)  # from 1.05; sizes explain the rest
    assert found.shares[OpKind.SOFTMAX] == replace(
        PUBLISHED.shares[OpKind.SOFTMAX], launch=found.shares[OpKind.MATMUL].launch
    )
    assert all(one.error < 0.05 for one in leave_one_out(groups, device))


def test_a_group_is_foretold_without_having_been_seen() -> None:
    device, works = DEVICES["v100"], made_up(0)
    usual = seconds_of(works, device).tolist()
    groups = [Timed(name=f"{times}", works=works, seconds=[times * one for one in usual]) for times in (1, 1, 1, 10)]
    assert [one.seconds / one.foretold for one in leave_one_out(groups, device)][-1] == pytest.approx(10, rel=0.05)


def test_spreads_go_by_students_t_around_no_error() -> None:
    low, high = spread_of([math.e, math.e])
    assert (math.log(low), math.log(high)) == pytest.approx((-1.886, 1.886), abs=5e-4)


def test_four_in_five_further_cases_lie_within_a_spread() -> None:
    draw, inside = random.Random(0), 0
    for _ in range(2000):
        low, high = spread_of([math.exp(draw.gauss(0, 0.3)) for _ in range(6)])
        inside += low <= math.exp(draw.gauss(0, 0.3)) <= high
    assert inside / 2000 == pytest.approx(0.8, abs=0.03)


def test_an_efficiency_makes_sense() -> None:
    with pytest.raises(UsageError, match=r"matmul, .* is missing"):
        Efficiency(shares={})
    with pytest.raises(UsageError, match="Sizes are 0 or more"):
        replace(PUBLISHED, columns=-1.0)
    with pytest.raises(UsageError, match="to a greater one"):
        replace(PUBLISHED, step_spread=(2.0, 1.0))


def test_a_device_in_a_file_keeps_its_efficiency(tmp_path: Path) -> None:
    device = replace(DEVICES["t4"], efficiency=replace(PUBLISHED, step_spread=(0.5, 2.0)))
    write_device(tmp_path / "t4.json", device)
    assert read_device(tmp_path / "t4.json")[0] == device
