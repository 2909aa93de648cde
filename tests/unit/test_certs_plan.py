"""The order of a rotation's steps, what each waits for, and what is refused; what is done beside a read-only one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from certs.plan import plan
from certs.state import Authorities, Problem, Serving, State, is_valid, known, signed_by
from certs.steps import (
    Decision,
    Done,
    Forget,
    IssueLeaf,
    MakeAuthority,
    NoteServed,
    NoteTrusted,
    Promote,
    RotationPolicy,
    SeenFor,
    SetBundles,
    StepRefused,
    Wait,
)
from tests.rotation_world import (
    LONG,
    NAMES,
    NEW,
    POLICY,
    SEEN_LONG,
    START,
    World,
    at,
    current_of,
    go_on,
    healthy,
    rotated,
    take,
)
from vcuda.x509 import Names, make_authority, make_leaf

HOUR = timedelta(hours=1)


def test_the_steps_come_in_the_order_that_keeps_calls_working() -> None:
    world = healthy([timedelta(0)] * 2)
    world.sleep(60)
    taken, _ = go_on(world, Done)
    bundles = [SetBundles] * 2
    made = [MakeAuthority, *bundles, NoteTrusted, Wait, Promote, IssueLeaf]
    assert taken == [*made, NoteServed, Wait, *bundles, Forget]
    assert world.lost == []


def test_where_nothing_is_due_nothing_is_done_until_a_third_of_a_life_is_left() -> None:
    world = healthy()
    assert at(world, POLICY) == Done(START.replace(microsecond=0) + timedelta(days=60))


@pytest.mark.parametrize(
    ("days", "step"),
    [
        pytest.param(59, Done, id="leaf: not yet"),
        pytest.param(61, IssueLeaf, id="leaf: a third left"),
        pytest.param(487, MakeAuthority, id="CA: a third left"),
    ],
)
def test_a_third_of_its_life_before_its_end_a_certificate_is_renewed(days: int, step: type[Decision]) -> None:
    world = healthy()
    world.time += timedelta(days=days)
    assert isinstance(at(world, POLICY), step)


def test_a_leaf_alone_is_renewed_by_the_same_authority() -> None:
    world = healthy([timedelta(0)])
    before = current_of(world)
    world.time += timedelta(days=61)
    take(world, at(world, POLICY), POLICY)
    assert isinstance(at(world, POLICY), Done)
    assert world.state.serving.leaf
    assert signed_by(world.state.serving.leaf.certificate, before.certificate)
    assert current_of(world) is before


@pytest.mark.parametrize(
    ("step", "span", "seen"),
    [
        pytest.param(Promote, "overlap", "next_ca", id="the overlap"),
        pytest.param(Forget, "retention", "served", id="the retention"),
    ],
)
def test_a_clock_that_jumps_ahead_does_not_shorten(step: type[Decision], span: str, seen: str) -> None:
    """A run goes by nothing that it has not seen by itself for ten seconds."""
    world = rotated(Wait if step is Promote else NoteServed)
    if step is Forget:
        take(world, at(world))
    world.time += getattr(NEW, span) * 2
    for seconds in (0, 9):
        assert isinstance(at(world, seen=replace(SEEN_LONG, **{seen: timedelta(seconds=seconds)})), Wait)
    goes_on = SetBundles if step is Forget else step
    assert isinstance(at(world, seen=replace(SEEN_LONG, **{seen: timedelta(seconds=10)})), goes_on)


def test_a_note_from_the_future_is_written_anew() -> None:
    """A clock went wrong, and would have the rotation wait for years, or not at all."""
    world = rotated(Wait)
    mark = world.state.authorities.trusted
    assert mark
    future = replace(mark, since=world.time + LONG)
    world.state = replace(world.state, authorities=replace(world.state.authorities, trusted=future))
    assert isinstance(at(world), NoteTrusted)


def test_the_old_authority_stays_while_one_endpoint_shows_a_leaf_of_it_though_it_is_not_ready() -> None:
    """It may become ready at any time."""
    world = rotated(IssueLeaf)
    straggler, old_leaf = world.pods[0], world.pods[0].leaf
    take(world, at(world))
    world.sleep(1)
    take(world, at(world))
    world.time += timedelta(days=2)
    assert isinstance(at(world), SetBundles)
    straggler.ready, straggler.leaf = False, old_leaf
    assert isinstance(at(world), StepRefused)
    straggler.leaf = None
    assert isinstance(at(world), SetBundles)


def unready(world: World) -> None:
    for pod in world.pods:
        pod.ready = False


def silence(world: World) -> None:
    world.pods[0].leaf = None


@pytest.mark.parametrize(
    ("change", "command"),
    [
        pytest.param(lambda world: world.pods.clear(), "get pods,endpointslices", id="no endpoint"),
        pytest.param(unready, "get pods,endpointslices", id="none ready"),
        pytest.param(silence, "rollout restart", id="one cannot be asked, for long"),
    ],
)
def test_what_a_person_has_to_look_at_names_the_command(change: Callable[[World], None], command: str) -> None:
    world = rotated(NoteServed)
    change(world)
    world.time += HOUR
    decision = at(world)
    assert isinstance(decision, StepRefused)
    assert command in decision.problems[0].command


def test_an_endpoint_is_given_time_to_follow_before_anybody_is_asked() -> None:
    world = rotated(NoteServed)
    silence(world)
    assert isinstance(at(world), Wait)


def test_a_broken_leaf_is_mended_at_once_where_no_call_succeeds_anyway() -> None:
    """The caBundles come first all the same."""
    world = healthy([timedelta(0)])
    world.time += timedelta(days=91)
    assert isinstance(at(world, POLICY, SeenFor()), IssueLeaf)


def test_a_broken_secret_waits_a_moment_while_its_pods_still_serve() -> None:
    world = healthy([timedelta(0)])
    world.state = replace(world.state, serving=Serving())
    assert at(world, POLICY, SeenFor()) == Wait(
        "the API servers are given a moment to read the caBundles", START + timedelta(seconds=10)
    )
    assert isinstance(at(world, POLICY), IssueLeaf)


BROKEN = {
    "no Secret": lambda _: Serving(),
    "garbage": lambda _: Serving("s", fault="tls.crt holds no certificate"),
    "another name": lambda authority: Serving("s", make_leaf(authority, Names(("elsewhere",)), START), (), ""),
    "an unknown CA": lambda _: Serving("s", make_leaf(make_authority(START), NAMES, START), (), ""),
}


@pytest.mark.parametrize("serving", BROKEN.values(), ids=BROKEN.keys())
def test_a_leaf_that_nobody_could_use_is_issued_anew(serving: Callable[..., Serving]) -> None:
    world = healthy()
    world.state = replace(world.state, serving=serving(current_of(world)))
    assert isinstance(at(world, POLICY), IssueLeaf)


def test_a_first_run_makes_everything_without_waiting() -> None:
    """There may be no configuration and no endpoint yet: the webhook needs its Secret to start at all."""
    state, steps = State(), []
    world = World(state)
    while not isinstance(decision := at(world, POLICY, SeenFor()), Done):
        steps.append(type(decision))
        take(world, decision, POLICY)
    assert steps == [MakeAuthority, Promote, IssueLeaf]


def test_where_nobody_calls_or_answers_for_long_a_person_is_sent_there() -> None:
    """The certificates are as they should be, and no call succeeds."""
    world = World(State())
    while not isinstance(decision := at(world, POLICY, SeenFor()), Done):
        take(world, decision, POLICY)
    world.time += timedelta(minutes=9)
    assert isinstance(at(world, POLICY, SeenFor()), Done)
    world.time += timedelta(minutes=2)
    decision = at(world, POLICY, SeenFor())
    assert isinstance(decision, StepRefused)
    assert [problem.command.split()[1] for problem in decision.problems] == ["label", "-n"]


def test_where_no_configuration_is_to_call_none_is_missed() -> None:
    """The extender's certificate is such: the scheduler that calls it has the CA from a file."""
    world = healthy()
    world.state = replace(world.state, configurations=())
    world.time += HOUR
    assert isinstance(at(world, POLICY), StepRefused)
    assert isinstance(at(world, replace(POLICY, registered=False)), Done)


def test_whoever_is_called_by_no_configuration_is_told_how_its_authority_is_replaced() -> None:
    """As the extender, whose callers read the CA from a file, once."""
    world = healthy()
    world.sleep(60)
    world.state = replace(world.state, configurations=())
    policy = replace(NEW, registered=False)
    take(world, at(world, policy), policy)
    decision = at(world, policy)
    assert isinstance(decision, StepRefused)
    assert decision.problems[0].command == "kubectl -n vcuda-quota delete secret vcuda-webhook-ca vcuda-webhook-tls"
    before = known(world.state)
    world.state = replace(world.state, authorities=Authorities(), serving=Serving())
    while not isinstance(decision := at(world, policy), Wait):
        take(world, decision, policy)
    assert current_of(world).certificate not in before
    assert world.state.serving.leaf
    assert signed_by(world.state.serving.leaf.certificate, current_of(world).certificate)


def test_without_a_configuration_a_good_authority_is_not_replaced() -> None:
    """A label that was mistyped must not pass for trust everywhere."""
    world = healthy([timedelta(0)])
    world.state = replace(world.state, configurations=())
    world.sleep(60)
    take(world, at(world))
    decision = at(world)
    assert isinstance(decision, StepRefused)
    assert "kubectl label validatingwebhookconfiguration" in decision.problems[0].command


def waiting_for_the_next_authority(policy: RotationPolicy = NEW) -> World:
    """A world in its overlap, whose leaf has come into its look-ahead meanwhile."""
    world = rotated(Wait, policy)
    leaf = make_leaf(current_of(world), NAMES, START, timedelta(seconds=80))
    world.state = replace(world.state, serving=replace(world.state.serving, leaf=leaf))
    for pod in world.pods:
        pod.leaf = leaf.certificate
    return world


def test_while_the_next_authority_waits_a_leaf_that_is_due_is_renewed_by_the_current_one() -> None:
    """The overlap may be longer than what the leaf has left."""
    policy = replace(NEW, overlap=timedelta(days=30))
    world = waiting_for_the_next_authority(policy)
    assert isinstance(at(world, policy, replace(SEEN_LONG, current=timedelta())), Wait)
    decision = at(world, policy)
    assert isinstance(decision, IssueLeaf)
    take(world, decision, policy)
    leaf = world.state.serving.leaf
    assert leaf
    assert signed_by(leaf.certificate, current_of(world).certificate)
    assert at(world, policy) == Wait(
        "the API servers are given time to trust the next CA", START + timedelta(days=30, seconds=60)
    )


def test_a_leaf_that_is_due_is_renewed_though_nobody_can_trust_the_next_authority() -> None:
    """It may be long until a person has seen to the label of the configurations."""
    world = waiting_for_the_next_authority()
    world.state = replace(world.state, configurations=())
    decision = at(world)
    assert isinstance(decision, IssueLeaf)
    take(world, decision)
    assert isinstance(at(world), StepRefused)


def test_a_leaf_is_not_renewed_again_and_again_where_its_authority_ends_with_it() -> None:
    policy = replace(NEW, overlap=LONG, authority_life=4 * LONG)
    world = rotated(Wait, policy)
    world.time = START + timedelta(days=729)
    leaf = make_leaf(current_of(world), NAMES, START + timedelta(days=700))
    world.state = replace(world.state, serving=replace(world.state.serving, leaf=leaf))
    assert isinstance(at(world, policy), Wait)


def test_an_authority_of_ours_that_only_a_cabundle_knows_goes_as_a_retired_one() -> None:
    """It is trusted until every endpoint has shown another's leaf for the retention; no other caBundle gets it."""
    world = healthy([timedelta(0)])
    stray = make_authority(START - HOUR).certificate
    first, *rest = world.state.configurations
    with_stray = replace(first, hooks=tuple(replace(hook, bundle=(stray, *hook.bundle)) for hook in first.hooks))
    world.state = replace(world.state, configurations=(with_stray, *rest))
    noted = at(world, POLICY)
    assert isinstance(noted, NoteServed)
    take(world, noted, POLICY)
    assert isinstance(at(world, POLICY), Wait)
    world.time += POLICY.retention
    dropped = at(world, POLICY)
    assert isinstance(dropped, SetBundles)
    assert dropped.bundles == ((current_of(world).certificate,),)
    take(world, dropped, POLICY)
    assert isinstance(at(world, POLICY), Done)


def test_an_authority_of_ours_that_only_a_cabundle_knows_stays_while_an_endpoint_shows_a_leaf_of_it() -> None:
    world = healthy([timedelta(0)] * 2)
    stray = make_authority(START)
    bundles = tuple(
        replace(one, hooks=tuple(replace(hook, bundle=(stray.certificate, *hook.bundle)) for hook in one.hooks))
        for one in world.state.configurations
    )
    world.state = replace(world.state, configurations=bundles)
    world.pods[0].leaf = make_leaf(stray, NAMES, START).certificate
    world.time += timedelta(days=2)
    assert isinstance(at(world, POLICY), StepRefused)


def test_a_lost_authority_stays_trusted_until_its_leaves_are_gone() -> None:
    world = healthy([timedelta(0)])
    old = current_of(world).certificate
    world.state = replace(world.state, authorities=Authorities())
    take(world, at(world, POLICY), POLICY)
    assert world.state.authorities.retired == (old,)


def test_an_issue_time_in_the_future_replaces_nothing() -> None:
    """Else what is made now would be replaced again, and again."""
    world = healthy()
    assert isinstance(at(world, replace(POLICY, issued_before=START + LONG)), Done)


def test_what_is_refused_stops_everything() -> None:
    state = State(problems=(Problem("the clock is wrong", "date"),))
    assert plan(state, START, POLICY, SEEN_LONG) == StepRefused(state.problems)


def test_nothing_is_done_where_another_tool_does_it() -> None:
    assert plan(State(tool="cert-manager"), START, POLICY, SEEN_LONG) == Done(None)


def test_new_certificates_have_the_lives_that_are_wanted() -> None:
    policy = replace(POLICY, authority_life=timedelta(days=20), leaf_life=timedelta(days=5))
    world = World(State())
    while not isinstance(decision := at(world, policy, SeenFor()), Done):
        take(world, decision, policy)
    leaf = world.state.serving.leaf
    assert leaf
    assert (current_of(world).expires - START, leaf.expires - START) == (policy.authority_life, policy.leaf_life)
    assert is_valid(leaf.certificate, START)


LOCK = Problem("validatingwebhookconfiguration/vcuda-quota may not be written", "kubectl edit")


def read_only(world: World) -> World:
    """The world with one of its configurations locked."""
    *rest, last = world.state.configurations
    world.state = replace(world.state, configurations=(*rest, replace(last, read_only=LOCK)))
    return world


def test_a_locked_configuration_is_told_of_though_nothing_is_due() -> None:
    assert at(read_only(healthy()), POLICY) == StepRefused((LOCK,))


def test_a_leaf_is_renewed_beside_a_locked_configuration() -> None:
    world = read_only(healthy([timedelta(0)]))
    world.time += timedelta(days=61)
    assert isinstance(at(world, POLICY), IssueLeaf)


def test_an_authority_that_a_locked_configuration_does_not_trust_is_not_promoted() -> None:
    world = read_only(healthy([timedelta(0)]))
    world.sleep(60)
    steps = []
    while not isinstance(decision := at(world), StepRefused):
        steps.append(type(decision))
        take(world, decision)
    assert decision == StepRefused((LOCK,))
    assert steps == [MakeAuthority, SetBundles]


@pytest.mark.parametrize("restored", [False, True], ids=["both Secrets deleted", "the CA Secret from a backup"])
def test_what_a_locked_configuration_trusts_is_not_replaced_though_it_is_broken(restored: bool) -> None:
    """The pods serve on what it trusts; another leaf would cut it off until a person has unlocked it."""
    world = healthy([timedelta(0)])
    world.sleep(60)
    backup = Authorities(current=make_authority(START - timedelta(days=2)))
    serving = world.state.serving if restored else Serving()
    world.state = replace(world.state, authorities=backup if restored else Authorities(), serving=serving)
    world = read_only(world)
    steps = []
    while not isinstance(decision := at(world), StepRefused):
        steps.append(type(decision))
        take(world, decision)
    assert not {Promote, IssueLeaf} & {*steps}
    assert decision == StepRefused((LOCK,))
    assert world.lost == []


def test_a_locked_configuration_that_may_trust_what_cannot_be_asked_is_not_cut_off() -> None:
    world = read_only(healthy([timedelta(0)]))
    world.state = replace(world.state, serving=Serving())
    [pod] = world.pods
    pod.leaf = None
    world.look()
    decision = at(world, replace(POLICY, issued_before=START + timedelta(hours=1)))
    while isinstance(decision, MakeAuthority | SetBundles):
        take(world, decision)
        decision = at(world, POLICY)
    assert not isinstance(decision, Promote)


def test_a_locked_configuration_that_never_trusted_what_is_served_keeps_no_authority_back() -> None:
    """Somebody's leftover, with another caBundle or none: it has nothing to lose."""
    world = healthy([timedelta(0)])
    world.sleep(60)
    *_, last = world.state.configurations
    hooks = tuple(replace(hook, name=f"old-{hook.name}", bundle=()) for hook in last.hooks)
    leftover = replace(last, name="leftover", read_only=LOCK, hooks=hooks)
    world.state = replace(world.state, configurations=(*world.state.configurations, leftover))
    steps, decision = go_on(world, StepRefused)
    assert {Promote, Forget} <= {*steps}
    assert decision == StepRefused((LOCK,))
    assert world.lost == []


def test_an_authority_that_a_locked_configuration_still_trusts_is_not_forgotten() -> None:
    world = rotated(Forget)
    old = world.state.authorities.retired
    *rest, last = world.state.configurations
    holding = replace(last, read_only=LOCK, hooks=tuple(replace(hook, bundle=old) for hook in last.hooks))
    world.state = replace(world.state, configurations=(*rest, holding))
    assert at(world) == StepRefused((LOCK,))
