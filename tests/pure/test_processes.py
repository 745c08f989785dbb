"""What is asked here stands in this module, where a fresh process finds it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spillway.errors import BudgetInfeasible, SpillwayError, UsageError
from spillway.processes import Unanswered, answers, as_sent, how_it_ended, talking


def double(number: int) -> int:
    return 2 * number


def whose(number: int) -> int:
    return os.getpid()


def only_even(number: int) -> int:
    if number % 2:
        raise UsageError(f"{number} is odd.")
    return number


def buggy(number: int) -> int:
    return [1][number]


def deadly(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        os._exit(3)
    return number


def interrupted(number: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return number


def endless(number: int) -> int:
    while number:
        signal.pause()
    return number


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_every_task_is_answered_once_whatever_the_number_of_processes(processes: int) -> None:
    found = [answer for answer in answers(double, range(7), processes) if isinstance(answer, int)]
    assert sorted(found) == [0, 2, 4, 6, 8, 10, 12]


def test_there_are_no_more_processes_than_asked_for_and_one_is_this_one() -> None:
    assert set(answers(whose, range(4), 1)) == {os.getpid()}
    assert len({*answers(whose, range(6), 2), os.getpid()}) in (2, 3)
    assert os.getpid() not in set(answers(whose, range(6), 2))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_task_that_is_refused_does_not_keep_the_others_away(processes: int) -> None:
    found = list(answers(only_even, range(4), processes))
    assert sorted(answer for answer in found if isinstance(answer, int)) == [0, 2]
    refused = [answer for answer in found if isinstance(answer, Unanswered)]
    assert sorted((answer.task, answer.why) for answer in refused) == [(1, "1 is odd."), (3, "3 is odd.")]


def test_a_bug_shows_its_traceback_and_is_told_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    found = list(answers(buggy, range(2), 1))
    assert found[0] == 1
    assert isinstance(found[1], Unanswered)
    assert found[1].why.startswith("IndexError was raised (list index out of range); its traceback stands above.")
    assert "Traceback" in capfd.readouterr().err


def test_a_process_that_dies_costs_its_task_alone_and_is_told_in_a_sentence() -> None:
    found = list(answers(deadly, range(6), 2))
    assert sorted(answer for answer in found if isinstance(answer, int)) == [0, 3, 4, 5]
    dead = {answer.task: answer.why for answer in found if isinstance(answer, Unanswered)}
    assert dead == {
        1: "The process that worked on it was killed, as the system does when memory runs out.",
        2: "The process that worked on it ended with exit code 3.",
    }


def test_ctrl_c_is_not_for_the_processes() -> None:
    assert sorted(answer for answer in answers(interrupted, range(4), 2) if isinstance(answer, int)) == [0, 1, 2, 3]


@pytest.mark.parametrize("ask", [endless, double])
def test_who_stops_listening_ends_every_process(ask: Callable[[int], int]) -> None:
    before = children()
    with closing(answers(ask, [0, 1, 2], 2)) as coming:
        assert next(coming) in (0, 2)
        assert children() > before
    assert children() == before


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_what_a_process_prints_is_passed_on_and_its_messages_are_heard_until_it_ends() -> None:
    printed: list[str] = []
    there = {"SAID": "here", "PYTHONPATH": os.pathsep.join(sys.path)}  # where this module is found
    with talking(f"{__name__}:echo", [1], printed.append, environment=there) as talk:
        assert talk.hear() == [1]
        talk.ask(2)
        assert talk.hear() == (2, "here")
        talk.ask(None)
        for _ in range(2):
            with pytest.raises(EOFError):
                talk.hear()
        talk.ask("nobody is there, and that is no error")
        code = talk.process.wait()
    assert printed == ["ends"]
    assert str(how_it_ended("It ended", code)) == "It ended with exit code 7; what it printed stands above."
    assert str(how_it_ended("It ended", -15)) == "It ended: it was ended by SIGTERM."


def echo(connection: Connection, request: object) -> None:
    connection.send(request)
    connection.send((connection.recv(), os.environ["SAID"]))
    if connection.recv() is None:
        print("ends", flush=True)
        os._exit(7)


def test_what_a_process_has_started_ends_with_it() -> None:
    with talking(f"{__name__}:starting", None, environment={"PYTHONPATH": os.pathsep.join(sys.path)}) as talk:
        started = Path(f"/proc/{talk.hear()}/stat")
        assert started.read_text().split()[2] in "RSD"
    for _ in range(500):
        if not started.exists() or started.read_text().split()[2] in "ZX":
            return
        time.sleep(0.01)
    pytest.fail("it runs on")


def starting(connection: Connection, request: object) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        connection.send(started.pid)
        connection.recv()


def test_an_error_of_a_users_own_class_is_heard_as_one_of_ours() -> None:
    class TheirsError(UsageError):
        pass

    refused = BudgetInfeasible(needed=2, allowed=1, op="add", op_index=0, smallest_budget=2, exact=True)
    heard = pickle.loads(pickle.dumps(as_sent(refused)))
    assert (type(heard), str(heard), heard.smallest_budget) == (BudgetInfeasible, str(refused), 2)
    assert (type(as_sent(TheirsError("no."))), str(as_sent(TheirsError("no.")))) == (SpillwayError, "no.")
