"""Following a forward in program order: what is expected, and what becomes of that where it runs otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from spillway.pilots.course import Course
from spillway.pilots.paths import Sample
from spillway.pilots.pilot import Foresight
from spillway.pilots.program import Group, Program
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
        assert (course.mispredicted, course.unseen) == (0, 0)
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
        ran = [part for part in range(1, program.decisions + 1) if bits[part - 1]]
        assert course.mispredicted == len(ran)
        assert [group for _, group in course.visits] == list(program.visits(sample.path).groups)
        # At the end nothing is expected, and on the way never what has been passed.
        assert expected[-1] == [program.visits(sample.path).groups[-1]]
        places = {group: place for place, group in enumerate(dict.fromkeys(program.uses_where(np.ones_like(bits))[1]))}
        for op, ahead in enumerate(expected):
            reached = [places[group] for clock, group in course.visits if clock <= op]
            assert all(places[group] >= max(reached) for group in ahead)


def test_before_a_pilot_was_asked_everything_is_expected_in_program_order() -> None:
    course, samples, _ = course_of()
    course.begin()
    assert list(course.ahead()) == list(course.program.uses_where(np.ones(course.program.decisions, np.float32))[1])
    follow(course, samples[0])
    assert course.mispredicted == 0


def test_ops_that_nobody_knows_are_counted_and_passed_by() -> None:
    course, _, network = course_of()
    course.begin()
    ahead = list(course.ahead())
    course.passed(len(network.architecture.ops), 0)
    course.passed(len(network.architecture.ops) + 3, 1)
    assert (course.unseen, list(course.ahead()), course.visits) == (2, ahead, [])


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
    follow(course, later[-1])
    assert (course.mispredicted, course.unseen) == (0, 0)


@pytest.mark.parametrize("decisions", [0, 2, 9])
def test_a_foresight_of_fewer_or_more_decisions_than_there_are_now_is_no_error(decisions: int) -> None:
    course, samples, _ = course_of()
    course.begin()
    course.expect(Foresight(np.zeros(decisions, np.float32)))
    follow(course, samples[0])
    assert [group for _, group in course.visits] == list(course.program.visits(samples[0].path).groups)
