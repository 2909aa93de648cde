"""Property tests of the rotation of certificates.

Runs start in any state and may be killed at any point. The last run must finish. No run may remove a CA in use.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from certs.plan import plan
from certs.rotation import Observations, Rotation
from certs.state import Authorities, Hook, Serving
from certs.steps import Done, RotationPolicy, StepRejected, Wait, Write, write_of
from tests.rotation_world import NAMES, NEW, START, Killed, World, healthy, with_stragglers
from vcuda.errors import Conflict
from vcuda.x509 import make_authority, make_leaf, signed_by

pytestmark = pytest.mark.slow

SECOND, HOUR, DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)
LATEST = 60 * HOUR
"""The longest time until a pod is ready, or until it serves a new certificate."""
FOREIGN = make_authority(START).certificate
Damage = Callable[[World], None]


def lose_the_key(world: World) -> None:
    there = world.state.authorities
    retired = (*there.retired, *([there.current.certificate] if there.current else []))
    world.put(authorities=replace(there, current=None, retired=retired, faults=("garbage",)))


def recreate_a_configuration(world: World) -> None:
    *rest, last = world.state.configurations
    fresh = replace(last, version=f"{last.version}'", hooks=(Hook(1, "new", ()),))
    world.put(configurations=(*rest, fresh))


def set_the_clock_back(world: World) -> None:
    world.time -= timedelta(hours=3)


def restore_an_old_leaf(world: World) -> None:
    lost = make_authority(world.time)
    world.put(serving=Serving("old", make_leaf(lost, NAMES, world.time), (lost.certificate,), ""))


def restore_an_old_authority(world: World) -> None:
    world.put(authorities=Authorities(world.state.authorities.version, make_authority(world.time - DAY)))


def note(world: World, **fields: Any) -> None:
    world.put(authorities=replace(world.state.authorities, **fields))


DAMAGES: dict[str, Damage] = {
    "CA Secret lost": lambda world: world.put(authorities=Authorities()),
    "CA key is garbage or of another CA": lose_the_key,
    "serving Secret lost": lambda world: world.put(serving=Serving()),
    "leaf is garbage": lambda world: world.put(serving=replace(world.state.serving, leaf=None, fault="garbage")),
    "caBundles emptied": lambda world: world.put_hooks(bundle=()),
    "one caBundle emptied": lambda world: world.put_hooks(0, bundle=(), faulty=True),
    "a configuration recreated": recreate_a_configuration,
    "recorded times lost": lambda world: note(world, trusted=None, served=None),
    "recorded times are in the future": set_the_clock_back,
    "old serving Secret of an unknown CA restored": restore_an_old_leaf,
    # If somebody restores an old CA Secret, the CAs that were made after it remain only in the caBundles.
    "old CA Secret restored": restore_an_old_authority,
    "retired.crt is garbage": lambda world: note(world, retired=(), faults=("garbage",)),
    "no run until the leaf expired": lambda world: world.sleep(91 * DAY.total_seconds()),
    "no run until the CA expired": lambda world: world.sleep(731 * DAY.total_seconds()),
}

lags = st.lists(st.integers(0, 90).map(lambda seconds: timedelta(seconds=seconds)), min_size=1, max_size=3)
hours = st.integers(0, LATEST // HOUR).map(lambda count: count * HOUR)
stragglers = st.lists(st.tuples(hours, hours), max_size=1)
budgets = st.sampled_from([timedelta(seconds=15), timedelta(seconds=30), timedelta(minutes=5), 2 * DAY])


def run(world: World, policy: RotationPolicy, budget: timedelta, dies_after: int | None = None) -> object:
    """Return the result of one run of the rotation, or None if the test killed the run."""
    world.lives_after = dies_after
    try:
        return Rotation(world, policy, budget, world, lambda _: None, longest_sleep=1800).run()
    except Killed:
        return None
    finally:
        world.lives_after = None


def run_daily(world: World, policy: RotationPolicy, deaths: list[int], budget: timedelta) -> object:
    """Return the result of the last of many daily runs. The first runs are killed after ``deaths`` writes."""
    ended: object = None
    for dies_after in [*deaths, *[None] * 12]:
        ended = run(world, policy, budget, dies_after)
        if isinstance(ended, Done):
            break
        world.sleep(DAY.total_seconds())
    return ended


def assert_at_rest(world: World) -> None:
    """Assert that every caBundle has our only CA, and that every pod serves a certificate of it."""
    current, there = world.current, world.state.authorities
    assert (there.next_ca, there.retired) == (None, ())
    assert {hook.bundle for hook in world.state.hooks()} <= {(current.certificate,), (FOREIGN, current.certificate)}
    assert all(pod.leaf and signed_by(pod.leaf, current.certificate) for pod in world.pods)
    assert world.works()


@given(lags=lags, late=stragglers, deaths=st.lists(st.integers(0, 8), max_size=12), budget=budgets)
@example(lags=[timedelta()], late=[(3 * DAY, 2.2 * DAY)], deaths=[], budget=timedelta(minutes=5))
@settings(max_examples=25)
def test_a_rotation_killed_anywhere_ends_the_same_and_never_removes_trust(
    lags: list[timedelta], late: list[tuple[timedelta, timedelta]], deaths: list[int], budget: timedelta
) -> None:
    world = with_stragglers(healthy(*lags, extra=(FOREIGN,)), late)
    before = world.current
    world.sleep(60)
    assert isinstance(run_daily(world, NEW, deaths, budget), Done)
    assert world.current.certificate != before.certificate
    assert_at_rest(world)
    assert world.lost == []


@pytest.mark.parametrize("hooks", [1, 2])
def test_runs_that_are_each_killed_at_their_first_write_finally_finish(hooks: int) -> None:
    """If a run undid the work of an earlier run, the runs would never finish."""
    world = healthy()
    world.put(configurations=world.state.configurations[:hooks])
    world.sleep(60)
    for _ in range(6 + 2 * hooks):
        assert run(world, NEW, 2 * DAY, 1) is None
    assert isinstance(run(world, NEW, 2 * DAY), Done)
    assert world.writes == 6 + 2 * hooks
    assert_at_rest(world)
    assert world.lost == []


@given(
    lags=lags,
    late=stragglers,
    progress=st.integers(0, 10),
    damages=st.lists(st.sampled_from([*DAMAGES]), min_size=1, max_size=3),
    deaths=st.lists(st.integers(0, 8), max_size=6),
    budget=budgets,
)
@example(
    lags=[timedelta(), SECOND],
    late=[],
    progress=0,
    damages=["CA Secret lost", "caBundles emptied", "old serving Secret of an unknown CA restored"],
    deaths=[],
    budget=15 * SECOND,
)
@example(lags=[90 * SECOND], late=[], progress=6, damages=["retired.crt is garbage"], deaths=[], budget=15 * SECOND)
@example(lags=[90 * SECOND], late=[], progress=10, damages=["old CA Secret restored"], deaths=[], budget=2 * DAY)
@example(
    lags=[timedelta()],
    late=[(HOUR, 2 * HOUR)],
    progress=5,
    damages=["caBundles emptied", "retired.crt is garbage"],
    deaths=[],
    budget=15 * SECOND,
)
@settings(max_examples=40)
def test_runs_converge_after_any_damage_and_never_remove_trust(
    lags: list[timedelta],
    late: list[tuple[timedelta, timedelta]],
    *,
    progress: int,
    damages: list[str],
    deaths: list[int],
    budget: timedelta,
) -> None:
    world = with_stragglers(healthy(*lags), late)
    world.sleep(60)
    run(world, NEW, 2 * DAY, progress)
    for damage in damages:
        DAMAGES[damage](world)
    world.forget_what_worked()
    world.look()
    assert isinstance(run_daily(world, NEW, deaths, budget), Done)
    # The rotation does not wait for a pod that is not ready, even if the CA of this pod's certificate is no longer in
    # the caBundles. So the test waits until every pod serves the newest certificate.
    world.sleep(LATEST.total_seconds())
    assert_at_rest(world)
    assert world.lost == []


@given(
    lags=lags,
    authority_hours=st.integers(6, 8),
    leaf_minutes=st.integers(60, 150),
    overlap=st.floats(0.01, 0.25),
    retention=st.floats(0.01, 0.25),
    read_only=st.booleans(),
)
@example(
    lags=[timedelta(), timedelta(seconds=90)],
    authority_hours=12,
    leaf_minutes=120,
    overlap=1 / 12,
    retention=1 / 12,
    read_only=False,
)
@settings(max_examples=8)
def test_no_leaf_expires_while_it_is_served_for_any_lives(
    lags: list[timedelta], authority_hours: int, leaf_minutes: int, overlap: float, retention: float, *, read_only: bool
) -> None:
    """Two CAs may be trusted for longer than a certificate is valid. A webhook configuration may be read-only."""
    life = timedelta(hours=authority_hours)
    policy = RotationPolicy(NAMES, life, timedelta(minutes=leaf_minutes), life * overlap, life * retention)
    world = healthy(*lags, policy=policy)
    if read_only:
        world.forbidden = frozenset({str(world.state.configurations[0])})
    end = START + (life * 0.9 if read_only else life * 1.5)
    while world.time < end:
        run(world, policy, timedelta(seconds=30))
        world.sleep(leaf_minutes * 60 / 9)
    assert world.works()
    assert world.lost == []


@given(lags=lags, late=stragglers, turns=st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=80))
@settings(max_examples=25)
def test_two_runs_at_once_do_no_harm(
    lags: list[timedelta], late: list[tuple[timedelta, timedelta]], turns: list[tuple[int, bool]]
) -> None:
    """In each turn, a run either reads the state and decides, or writes its decision if no other run wrote since."""
    world = with_stragglers(healthy(*lags), late)
    world.sleep(60)
    policy = replace(NEW, overlap=DAY / 24)
    observations = [Observations(), Observations()]
    decided: list[Write | None] = [None, None]
    for runner, reads in turns:
        if reads:
            state = world.read(world.now)
            seen = observations[runner].observe(state, world.now(), world.monotonic())
            decision = plan(state, world.now(), policy, seen)
            if isinstance(decision, Wait | Done | StepRejected):
                world.sleep(600)
            else:
                decided[runner] = write_of(decision, state, world.now(), policy)
        elif (write := decided[runner]) is not None:
            decided[runner] = None
            try:
                world.write(write)
            except Conflict:
                continue
    assert isinstance(run_daily(world, policy, [], 2 * DAY), Done)
    assert_at_rest(world)
    assert world.lost == []
