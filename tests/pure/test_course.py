"""Following a forward in program order: what is expected, and what becomes of that where it runs otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spillway.pilots.architecture import Architecture
from spillway.pilots.course import Course
from spillway.pilots.paths import BaseType, ParameterStorage, PathOp, Sample, Site
from spillway.pilots.pilot import Foresight
from spillway.pilots.program import OPEN, Group, Program
from tests.pure.gated_network import GatedNetwork


def course_of(layers: int = 6, samples: int = 60) -> tuple[Course, list[Sample], GatedNetwork]:
    network = GatedNetwork(layers)
    found = network.samples(samples)
    return Course(Program(network.architecture)), found, network


def follow(course: Course, sample: Sample) -> list[list[Group]]:
    """What was expected after each op."""
    expected = []
    for clock, key in enumerate(sample.path.keys.tolist()):
        course.passed(key, clock)
        expected.append(list(course.ahead()))
    return expected


def test_a_forward_as_foreseen_is_expected_to_its_end() -> None:
    course, samples, _ = course_of()
    program = course.program
    for sample in samples[:10]:
        course.begin()
        course.expect(Foresight(program.bits(sample.path)))
        expected, visits = follow(course, sample), program.visits(sample.path)
        assert [group for _, group in course.visits] == list(visits.groups)
        for op, ahead in enumerate(expected):
            following = [group for group, at in zip(visits.groups, visits.ops, strict=True) if at > op]
            assert ahead == [[group for clock, group in course.visits if clock <= op][-1], *following]


def test_what_runs_unexpected_is_expected_from_there_on() -> None:
    course, samples, _ = course_of()
    program = course.program
    for sample in samples[:10]:
        bits = program.bits(sample.path)
        course.begin()
        course.expect(Foresight(np.float32(1) - bits))
        expected = follow(course, sample)
        assert [group for _, group in course.visits] == list(program.visits(sample.path).groups)
        # At the end nothing is expected, and on the way never what has been passed.
        assert expected[-1] == [program.visits(sample.path).groups[-1]]
        places = {group: place for place, group in enumerate(dict.fromkeys(program.uses_where(np.ones_like(bits))[1]))}
        for op, ahead in enumerate(expected):
            reached = [places[group] for clock, group in course.visits if clock <= op]
            assert all(places[group] >= max(reached) for group in ahead)


def test_a_part_that_runs_unexpected_is_expected_to_its_end() -> None:
    architecture = Architecture("branching", BaseType.LSTM)

    def op(module: str, parameter: str) -> int:
        touched = architecture.parameter(ParameterStorage(parameter, 1 << 20))
        return architecture.op(PathOp(Site(module, 0, 0), "aten.addmm.default", (touched,)))

    begin, one, two, then = (op(name, name) for name in ("begin", "one", "two", "then"))
    again = op("again", "two")
    for keys in ([begin, then, again], [begin, one, two, then, again]):
        architecture.path(keys, [0] * (len(keys) + 1), [])
    course = Course(Program(architecture))
    group = {key: groups[0] for key, groups in course.program.groups_of_op.items()}
    course.begin()
    course.expect(Foresight(np.zeros(course.program.decisions, np.float32)))
    course.passed(begin, 0)
    assert list(course.ahead()) == [group[begin], group[then], group[again]]
    course.passed(one, 1)
    assert list(course.ahead()) == [group[one], group[two], group[then], group[again]]


def test_before_a_pilot_was_asked_everything_is_expected_in_program_order() -> None:
    course, samples, _ = course_of()
    course.begin()
    assert list(course.ahead()) == list(course.program.uses_where(np.ones(course.program.decisions, np.float32))[1])
    assert follow(course, samples[0])[-1] == [course.program.visits(samples[0].path).groups[-1]]


def test_ops_that_nobody_knows_are_passed_by() -> None:
    course, _, network = course_of()
    course.begin()
    ahead = list(course.ahead())
    course.passed(len(network.architecture.ops), 0)
    course.passed(len(network.architecture.ops) + 3, 1)
    assert (list(course.ahead()), course.visits) == (ahead, [])


def test_a_program_that_has_grown_is_followed_from_the_next_forward_on() -> None:
    network = GatedNetwork(6)
    network.samples(1)
    course = Course(Program(network.architecture))
    later = network.samples(30)
    course.begin()
    follow(course, later[0])
    course.program.follow()
    course.begin()
    course.expect(Foresight(course.program.bits(later[-1].path)))
    expected, visits = follow(course, later[-1]), course.program.visits(later[-1].path)
    assert expected[0] == list(visits.groups)


@pytest.mark.parametrize("decisions", [0, 2, 9])
def test_a_foresight_of_fewer_or_more_decisions_than_there_are_now_is_no_error(decisions: int) -> None:
    course, samples, _ = course_of()
    course.begin()
    course.expect(Foresight(np.zeros(decisions, np.float32)))
    follow(course, samples[0])
    assert [group for _, group in course.visits] == list(course.program.visits(samples[0].path).groups)


def test_an_op_of_a_forward_that_was_given_up_changes_nothing_that_is_expected() -> None:
    network = GatedNetwork(6)
    network.samples(30)
    given_up = network.architecture.op(PathOp(Site("given.up", 0, 0), "aten.relu.default", ()))
    samples = network.samples(30)
    program = Program(network.architecture)
    course = Course(program)
    course.begin()
    course.expect(Foresight(np.zeros(program.decisions, np.float32)))
    before = list(course.ahead())
    course.passed(given_up, 0)
    assert list(course.ahead()) == before
    path = replace(samples[0].path, keys=np.array([given_up], np.int32))
    assert (program.known_after(path, 1) == OPEN).all()
