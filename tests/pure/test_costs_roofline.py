"""Seconds of ops by the roofline, and shares of a device from measured steps."""

from __future__ import annotations

import random
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.calibration import SHARES, apart, by, calibrate
from spillway.costs import DEVICES, Device, OpKind, Share, kind_of, step_seconds, timed
from spillway.costs.roofline import seconds_of, work_of
from spillway.errors import UsageError
from spillway.ir import Op, Phase, Step
from tests.pure.small_steps import Line, row

DEVICE = Device(
    name="one", flops_per_second=1e12, bytes_per_second=1e11, memory=1, out_per_second=1, in_per_second=1,
    source="made up", op_seconds=1e-6,
)  # fmt: skip
EVEN = MappingProxyType({kind: Share(compute=0.5, memory=0.25, launch=1.0) for kind in OpKind})


def op(name: str, *, flops: int = 0, traffic: int = 8) -> Op:
    return Op(number=0, name=name, phase=Phase.FORWARD, reads=(), creates=(), flops=flops, traffic=traffic)


def modelled(step: Step, op: Op, device: Device) -> float:
    return float(seconds_of([work_of(step, op)], device)[0])


# Kinds


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (OpKind.MATMUL, "aten.mm.default aten.addmm.default mm linear_backward"),
        (OpKind.BATCHED, "aten.bmm.default aten.baddbmm.default bmm"),
        (OpKind.ATTENTION, "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"),
        (OpKind.CONVOLUTION, "aten.convolution.default cudnn_convolution"),
        (OpKind.CONVOLUTION_BACKWARD, "aten.convolution_backward.default cudnn_convolution_backward"),
        (OpKind.NORM, "aten.native_layer_norm.default aten.native_batch_norm.default cudnn_batch_norm"),
        (OpKind.NORM_BACKWARD, "aten.native_batch_norm_backward.default cudnn_batch_norm_backward"),
        (OpKind.LAYER_NORM_BACKWARD, "aten.native_layer_norm_backward.default"),
        (OpKind.SOFTMAX, "aten._softmax.default aten._log_softmax.default"),
        (OpKind.SOFTMAX_BACKWARD, "aten._log_softmax_backward_data.default _softmax_backward_data"),
        (OpKind.RANDOM, "aten.native_dropout.default aten.bernoulli_.float aten.randn.default aten.normal_.default"),
        (OpKind.POOL, "aten.max_pool2d_with_indices.default aten._adaptive_avg_pool2d.default upsample_bilinear2d"),
        (OpKind.INDEX, "aten.embedding_dense_backward.default aten.nll_loss_forward.default aten.gather.default"),
        (OpKind.REDUCE, "aten.sum.dim_IntList aten.mean.dim aten.max.dim aten.linalg_vector_norm.default"),
        (
            OpKind.COPY,
            "aten.clone.default aten.copy_.default aten._to_copy.default aten.zeros.default aten.zero_.default",
        ),
        (OpKind.OPTIMIZER, "aten._foreach_addcdiv_.ScalarList aten._fused_adamw_.default"),
        (OpKind.TRANSCENDENTAL, "aten.gelu_backward.default aten.tanh.default aten.pow.Tensor_Scalar aten.exp.default"),
        (
            OpKind.ELEMENTWISE,
            "aten.add.Tensor aten.threshold_backward.default aten.maximum.default aten.mul_.Scalar lift",
        ),
    ],
)
def test_ops_are_of_a_kind_by_their_names(kind: OpKind, names: str) -> None:
    assert {name: kind_of(op(name)) for name in names.split()} == dict.fromkeys(names.split(), kind)


def test_what_neither_computes_nor_moves_nor_makes_anything_is_a_view() -> None:
    assert kind_of(op("aten.mm.default", traffic=0)) is OpKind.NOTHING
    view = row(Line(name="aten.view.default", nbytes=None))
    assert step_seconds(timed(view, DEVICE)) == 0


# The roofline


@pytest.mark.parametrize(
    ("flops", "traffic", "seconds"),
    [
        (10**9, 8, 1e9 / 0.5e12),  # bound by compute
        (8, 10**9, 1e9 / 0.25e11),  # bound by memory
        (0, 0, 16 / 0.25e11),  # nobody counted: the storages that it reads and makes
    ],
)
def test_an_op_takes_the_longer_of_computing_and_moving_and_its_launch(
    flops: int, traffic: int, seconds: float
) -> None:
    step = timed(row(Line(flops=flops, traffic=traffic)), by(DEVICE, EVEN))
    assert step.ops[0].seconds == pytest.approx(seconds + 1e-6)


def test_what_nobody_counted_is_what_the_op_touches() -> None:
    step = row(Line(nbytes=100, flops=7), source=30)
    assert work_of(step, step.ops[0])[1:3] == (7, 130)


def test_only_seconds_change_and_measured_ones_stay_where_that_is_asked_for() -> None:
    step = row(Line(seconds=9.0), Line(traffic=80))
    both = timed(step, by(DEVICE, EVEN))
    kept = timed(step, by(DEVICE, EVEN), keep_measured=True)
    assert kept.ops[0].seconds == 9.0
    assert both.ops[0].seconds != 9.0
    assert kept.ops[1] == both.ops[1]
    assert kept.digest() == step.digest()
    assert replace(both, ops=step.ops) == step


def test_shares_have_to_be_complete_and_above_zero() -> None:
    with pytest.raises(UsageError, match="matmul is missing"):
        timed(row(Line()), by(DEVICE, {kind: EVEN[kind] for kind in OpKind if kind is not OpKind.MATMUL}))
    with pytest.raises(UsageError, match="above 0"):
        Share(compute=0, memory=1)
    assert set(SHARES) == set(OpKind)


def test_a_step_without_seconds_has_no_length() -> None:
    with pytest.raises(UsageError, match=r"op 1 \(aten.relu.default\) has no seconds"):
        step_seconds(row(Line(seconds=1.0), Line()))


@pytest.mark.parametrize("name", DEVICES)
def test_a_faster_device_takes_no_longer(name: str) -> None:
    step = row(Line(name="aten.mm.default", flops=10**12, traffic=10**9), Line(traffic=10**9))
    twice = replace(
        DEVICES[name],
        flops_per_second=2 * DEVICES[name].flops_per_second,
        bytes_per_second=2 * DEVICES[name].bytes_per_second,
        host_seconds=0.0,
    )
    launches = 2 * DEVICES[name].op_seconds
    once = step_seconds(timed(step, replace(DEVICES[name], host_seconds=0.0))) - launches
    assert step_seconds(timed(step, twice)) - launches == pytest.approx(once / 2)


# Calibration

WORK = st.tuples(st.sampled_from(["aten.mm.default", "aten.add.Tensor"]), st.integers(0, 10**10), st.integers(8, 10**9))


@given(st.lists(st.tuples(WORK, st.floats(1e-7, 1.0)), min_size=1, max_size=12))
def test_modelled_seconds_of_every_kind_add_up_to_the_measured_ones(
    ops: list[tuple[tuple[str, int, int], float]],
) -> None:
    step = row(*(Line(name=name, flops=flops, traffic=traffic, seconds=s) for (name, flops, traffic), s in ops))
    shares = calibrate([step], DEVICE)
    for kind in {kind_of(op) for op in step.ops}:
        of_kind = [
            (op.seconds or 0.0, modelled(step, op, by(DEVICE, shares))) for op in step.ops if kind_of(op) is kind
        ]
        assert sum(model for _, model in of_kind) == pytest.approx(sum(seconds for seconds, _ in of_kind), rel=1e-6)
    assert step_seconds(timed(step, by(DEVICE, shares))) == pytest.approx(step_seconds(step), rel=1e-6)


def test_shares_that_times_were_made_from_are_found_again() -> None:
    made = MappingProxyType({**EVEN, OpKind.MATMUL: Share(compute=0.8, memory=0.3, launch=3.0)})
    draw = random.Random(0)
    lines = [
        Line(name="aten.mm.default", flops=int(10 ** draw.uniform(3, 9)), traffic=int(10 ** draw.uniform(2, 8)))
        for _ in range(400)
    ]
    step = timed(row(*lines), by(DEVICE, made))
    shares = calibrate([step], DEVICE)
    share = shares[OpKind.MATMUL]
    assert (share.compute, share.memory) == pytest.approx((0.8, 0.3), rel=0.02)
    assert share.launch == pytest.approx(3.0, rel=0.05)
    assert apart(step, DEVICE, shares) < 0.01


def test_single_ops_may_be_apart_where_totals_agree() -> None:
    step = row(Line(traffic=10**6, seconds=1.0), Line(traffic=10**6, seconds=3.0))
    shares = calibrate([step], DEVICE)
    assert step_seconds(timed(step, by(DEVICE, shares))) == pytest.approx(4.0)
    assert apart(step, DEVICE, shares) == pytest.approx(0.5)


def test_shares_are_judged_by_steps_that_they_were_not_found_from() -> None:
    shares = calibrate([row(Line(traffic=10**6, seconds=1.0))], DEVICE)
    assert apart(row(Line(traffic=10**6, seconds=2.0)), DEVICE, shares) == pytest.approx(0.5)


def test_a_kind_that_was_not_measured_keeps_the_usual_share() -> None:
    shares = calibrate([row(Line(traffic=10**6, seconds=1.0))], DEVICE)
    assert [kind for kind in OpKind if shares[kind] != SHARES[kind]] == [OpKind.ELEMENTWISE]


def test_small_ops_say_nothing_about_large_ones_of_their_kind() -> None:
    small = [Line(name="aten._softmax.default", traffic=800, seconds=3e-5 + 1e-6 * number) for number in range(4)]
    others = [Line(traffic=10**size, seconds=3e-5 + 10**size / 0.5e11) for size in range(2, 9)]
    shares = calibrate([row(*small, *others)], DEVICE)
    large = row(Line(name="aten._softmax.default", traffic=10**9))
    usual = 10**9 / (SHARES[OpKind.SOFTMAX].memory * DEVICE.bytes_per_second)
    assert step_seconds(timed(large, by(DEVICE, shares))) == pytest.approx(usual, rel=0.5)


def test_ops_that_took_no_time_leave_the_usual_share() -> None:
    step = row(Line(traffic=10**6, seconds=0.0))
    shares = calibrate([step], DEVICE)
    assert shares[OpKind.ELEMENTWISE] == SHARES[OpKind.ELEMENTWISE]
    assert apart(step, DEVICE, shares) == 0


def test_views_that_take_time_have_a_launch() -> None:
    step = row(Line(name="aten.view.default", nbytes=None, seconds=4e-6))
    assert modelled(step, step.ops[0], by(DEVICE, calibrate([step], DEVICE))) == pytest.approx(4e-6)


def test_a_device_without_launches_gets_none() -> None:
    step = row(Line(traffic=10**6, seconds=1.0))
    device = replace(DEVICE, op_seconds=0.0)
    assert modelled(step, step.ops[0], by(device, calibrate([step], device))) == pytest.approx(1.0)


def test_steps_without_seconds_calibrate_nothing() -> None:
    with pytest.raises(UsageError, match="No op of these steps has seconds"):
        calibrate([row(Line())], DEVICE)
