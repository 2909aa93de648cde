"""Tests of the time limit of a sweep (a pass of the node agent). The next sweep handles what is left."""

from tests.integration.node.disk import HOUR, Agent, Disk, nested, uid
from tests.integration.node.steps import Steps


def test_a_deletion_that_was_stopped_continues_in_a_later_sweep(disk: Disk, agent: Agent, steps: Steps) -> None:
    path = nested(disk, 1)
    agent.let_grace_pass()
    first = steps.taken
    agent.sweep(stopping=lambda: steps.taken >= first + 2)
    assert steps.taken == first + 2
    assert path.exists()
    disk.age(path, HOUR)
    agent.sweep_after_grace()
    assert disk.names() == set()


def test_a_large_directory_is_deleted_even_if_it_takes_all_the_time(disk: Disk, agent: Agent, steps: Steps) -> None:
    nested(disk, 1)
    nested(disk, 2)
    agent.let_grace_pass()
    first = steps.taken
    agent.sweep(give_up=lambda: steps.taken > first)
    assert len(disk.names()) == 1, "the first deletion is completed, and no other begins"


def test_stopping_ends_a_sweep_before_its_first_deletion(disk: Disk, agent: Agent, steps: Steps) -> None:
    nested(disk, 1)
    agent.let_grace_pass()
    agent.sweep(stopping=lambda: True)
    assert (steps.taken, disk.names()) == (0, {uid(1)})
