"""Tests of the certificate rotation's plan: its steps, and the states that a person must repair."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from certs import steps
from certs.plan import plan
from certs.state import Authorities, Problem, Serving, State, is_valid, known
from certs.steps import Done, Forget, IssueLeaf, MakeAuthority, NoteServed, Promote, SetBundles, StepRejected, Wait
from tests.rotation_world import LOCK, LONG, NAMES, NEW, POLICY, SEEN_LONG, START, World, healthy, rotated
from tests.tables import cases
from vcuda.x509 import Names, make_authority, make_leaf, signed_by

NOW, MINUTE, HOUR, DAY = timedelta(), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
UNSEEN = steps.SeenFor()
BOTH = [SetBundles] * 2


def rejected(decision: object) -> tuple[Problem, ...]:
    assert isinstance(decision, StepRejected)
    return decision.problems


def test_the_steps_are_in_the_order_that_keeps_calls_working() -> None:
    world = healthy(NOW, NOW, since=MINUTE)
    taken, _ = world.go_on(Done)
    made = [MakeAuthority, *BOTH, steps.NoteTrusted, Wait, Promote, IssueLeaf]
    assert taken == [*made, NoteServed, Wait, *BOTH, Forget]
    assert world.lost == []


def test_no_step_is_taken_until_a_third_of_a_life_is_left() -> None:
    assert healthy().decide(POLICY) == Done(START.replace(microsecond=0) + 60 * DAY)


@cases(
    "days, step",
    leaf_more_than_a_third_left=(59, Done),
    leaf_a_third_left=(61, IssueLeaf),
    CA_a_third_left=(487, MakeAuthority),
)
def test_a_third_of_its_life_before_its_end_a_certificate_is_renewed(days: int, step: type[steps.Decision]) -> None:
    assert isinstance(healthy(since=days * DAY).decide(POLICY), step)


def test_a_leaf_is_renewed_by_the_same_authority_if_only_the_leaf_is_due() -> None:
    world = healthy(NOW, since=61 * DAY)
    before = world.current
    world.take(POLICY)
    assert isinstance(world.decide(POLICY), Done)
    assert signed_by(world.leaf.certificate, before.certificate)
    assert world.current is before


@cases("step, span, seen", the_overlap=(Promote, "overlap", "next_ca"), the_retention=(Forget, "retention", "served"))
def test_a_clock_that_jumps_ahead_does_not_shorten_a_wait(step: type[steps.Decision], span: str, seen: str) -> None:
    """A run trusts a state only after it has itself observed the state for ten seconds."""
    world = rotated(Wait if step is Promote else NoteServed)
    if step is Forget:
        world.take()
    world.time += getattr(NEW, span) * 2
    for seconds in (0, 9):
        assert isinstance(world.decide(seen=replace(SEEN_LONG, **{seen: timedelta(seconds=seconds)})), Wait)
    goes_on = SetBundles if step is Forget else step
    assert isinstance(world.decide(seen=replace(SEEN_LONG, **{seen: timedelta(seconds=10)})), goes_on)


def test_a_note_from_the_future_is_replaced() -> None:
    """The next step waits for some time after the recorded time. With a time in the future it would wait for years."""
    world = rotated(Wait)
    there = world.state.authorities
    assert there.trusted
    world.put(authorities=replace(there, trusted=replace(there.trusted, since=world.time + LONG)))
    assert isinstance(world.decide(), steps.NoteTrusted)


def test_the_old_authority_stays_while_even_an_unready_endpoint_presents_its_leaf() -> None:
    """The pod that is not ready may become ready at any time."""
    world = rotated(IssueLeaf)
    straggler, old_leaf = world.pods[0], world.pods[0].leaf
    world.take()
    world.sleep(1)
    world.take()
    world.time += 2 * DAY
    assert isinstance(world.decide(), SetBundles)
    straggler.ready, straggler.leaf = False, old_leaf
    assert isinstance(world.decide(), StepRejected)
    straggler.leaf = None
    assert isinstance(world.decide(), SetBundles)


def unready(world: World) -> None:
    for pod in world.pods:
        pod.ready = False


def silence(world: World) -> None:
    world.pods[0].leaf = None


@cases(
    "change, command",
    no_endpoint=(lambda world: world.pods.clear(), "get pods,endpointslices"),
    no_endpoint_is_ready=(unready, "get pods,endpointslices"),
    an_endpoint_is_unreachable_for_long=(silence, "rollout restart"),
)
def test_each_problem_for_a_person_names_the_command(change: Callable[[World], None], command: str) -> None:
    world = rotated(NoteServed)
    change(world)
    world.time += HOUR
    assert command in rejected(world.decide())[0].command


def test_an_endpoint_has_time_to_follow_before_a_problem_is_reported() -> None:
    world = rotated(NoteServed)
    silence(world)
    assert isinstance(world.decide(), Wait)


def test_a_broken_leaf_is_replaced_at_once_if_no_call_succeeds_anyway() -> None:
    """Every call of the webhook fails already, so the run need not wait until the caBundles are read."""
    assert isinstance(healthy(NOW, since=91 * DAY).decide(POLICY, UNSEEN), IssueLeaf)


def test_a_broken_secret_waits_a_moment_while_its_pods_still_serve() -> None:
    world = healthy(NOW)
    world.put(serving=Serving())
    reason = "the API servers are given a moment to read the caBundles"
    assert world.decide(POLICY, UNSEEN) == Wait(reason, START + timedelta(seconds=10))
    assert isinstance(world.decide(POLICY), IssueLeaf)


@cases(
    "serving",
    no_Secret=lambda _: Serving(),
    garbage=lambda _: Serving("s", fault="tls.crt contains no certificate"),
    another_name=lambda authority: Serving("s", make_leaf(authority, Names(("elsewhere",)), START), (), ""),
    an_unknown_CA=lambda _: Serving("s", make_leaf(make_authority(START), NAMES, START), (), ""),
)
def test_an_unusable_leaf_is_replaced(serving: Callable[..., Serving]) -> None:
    world = healthy()
    world.put(serving=serving(world.current))
    assert isinstance(world.decide(POLICY), IssueLeaf)


def test_a_first_run_creates_everything_with_the_configured_lives_and_without_waiting() -> None:
    """The webhook needs its Secret to start, so there may be no webhook configuration and no endpoint yet."""
    world = World()
    taken, _ = world.go_on(Done, replace(POLICY, ca_life=20 * DAY, leaf_life=5 * DAY), UNSEEN)
    assert taken == [MakeAuthority, Promote, IssueLeaf]
    assert (world.current.expires - START, world.leaf.expires - START) == (20 * DAY, 5 * DAY)
    assert is_valid(world.leaf.certificate, START)


def test_a_missing_configuration_is_no_problem_if_none_is_required() -> None:
    """The scheduler extender has no webhook configuration. Its caller, kube-scheduler, reads the CA from a file."""
    world = healthy(since=HOUR)
    world.put(configurations=())
    assert isinstance(world.decide(POLICY), StepRejected)
    assert isinstance(world.decide(replace(POLICY, registered=False)), Done)


def test_without_configurations_the_problem_says_how_to_replace_the_authority() -> None:
    """The callers of the scheduler extender read the CA from a file only at their start, so they must be restarted."""
    world = healthy(since=MINUTE)
    world.put(configurations=())
    policy = replace(NEW, registered=False)
    _, decision = world.go_on(StepRejected, policy)
    assert rejected(decision)[0].command == "kubectl -n vcuda-quota delete secret vcuda-webhook-ca vcuda-webhook-tls"
    before = known(world.state)
    world.put(authorities=Authorities(), serving=Serving())
    world.go_on(Wait, policy)
    assert world.current.certificate not in before
    assert signed_by(world.leaf.certificate, world.current.certificate)


def test_without_a_configuration_a_valid_authority_is_not_replaced() -> None:
    """If the label of a configuration is mistyped, the rotation does not find it and cannot add a new CA to it."""
    world = healthy(NOW, since=MINUTE)
    world.put(configurations=())
    world.take()
    assert "kubectl label validatingwebhookconfiguration" in rejected(world.decide())[0].command


def waiting_for_the_next_authority(policy: steps.RotationPolicy = NEW) -> World:
    """Return a world in which both the old and new CA are trusted, and the serving certificate is due for renewal."""
    world = rotated(Wait, policy)
    leaf = make_leaf(world.current, NAMES, START, timedelta(seconds=80))
    world.put(serving=replace(world.state.serving, leaf=leaf))
    world.serve(leaf.certificate)
    return world


def test_while_the_next_authority_waits_a_leaf_that_is_due_is_renewed_by_the_current_one() -> None:
    """Both CAs are trusted for the time `--overlap`. The serving certificate may expire before the end of this time."""
    policy = replace(NEW, overlap=30 * DAY)
    world = waiting_for_the_next_authority(policy)
    assert isinstance(world.decide(policy, replace(SEEN_LONG, current=NOW)), Wait)
    assert isinstance(world.take(policy), IssueLeaf)
    assert signed_by(world.leaf.certificate, world.current.certificate)
    reason = "the API servers are given time to trust the next CA (--overlap)"
    assert world.decide(policy) == Wait(reason, START + 30 * DAY + MINUTE)


def test_a_leaf_that_is_due_is_renewed_although_the_next_authority_cannot_be_trusted_yet() -> None:
    """The next CA is trusted only after a person has restored the label of the configurations, which may take long."""
    world = waiting_for_the_next_authority()
    world.put(configurations=())
    assert isinstance(world.take(), IssueLeaf)
    assert isinstance(world.decide(), StepRejected)


def test_a_leaf_that_expires_with_its_authority_is_not_renewed_repeatedly() -> None:
    policy = replace(NEW, overlap=LONG, ca_life=4 * LONG)
    world = rotated(Wait, policy)
    world.time = START + 729 * DAY
    world.put(serving=replace(world.state.serving, leaf=make_leaf(world.current, NAMES, START + 700 * DAY)))
    assert isinstance(world.decide(policy), Wait)


def test_an_authority_that_is_only_in_a_cabundle_is_removed_like_a_retired_one() -> None:
    """The CA stays trusted until every endpoint has presented another CA's certificate for ``POLICY.retention``."""
    world = healthy(NOW)
    world.put_hooks(0, bundle=(make_authority(START - HOUR).certificate, world.current.certificate))
    assert isinstance(world.take(POLICY), NoteServed)
    assert isinstance(world.decide(POLICY), Wait)
    world.time += POLICY.retention
    dropped = world.take(POLICY)
    assert isinstance(dropped, SetBundles)
    assert dropped.bundles == ((world.current.certificate,),)
    assert isinstance(world.decide(POLICY), Done)


def test_an_authority_that_is_only_in_a_cabundle_stays_while_an_endpoint_presents_its_leaf() -> None:
    world, stray = healthy(NOW, NOW), make_authority(START)
    world.put_hooks(bundle=(stray.certificate, world.current.certificate))
    world.pods[0].leaf = make_leaf(stray, NAMES, START).certificate
    world.time += 2 * DAY
    assert isinstance(world.decide(POLICY), StepRejected)


def test_a_lost_authority_stays_trusted_until_its_leaves_are_replaced() -> None:
    world = healthy(NOW)
    old = world.current.certificate
    world.put(authorities=Authorities())
    world.take(POLICY)
    assert world.state.authorities.retired == (old,)


def test_an_issue_time_in_the_future_replaces_nothing() -> None:
    """With a future time in `--issued-before`, each run would replace the certificate that the last run issued."""
    assert isinstance(healthy().decide(replace(POLICY, issued_before=START + LONG)), Done)


def test_a_problem_stops_every_step() -> None:
    state = State(problems=(Problem("the clock is wrong", "date"),))
    assert plan(state, START, POLICY, SEEN_LONG) == StepRejected(state.problems)


def test_no_step_is_taken_if_another_tool_manages_the_certificates() -> None:
    assert plan(State(tool="cert-manager"), START, POLICY, SEEN_LONG) == Done(None, "no webhook is declared")


def locked(world: World) -> World:
    world.lock()
    return world


def test_a_locked_configuration_is_reported_although_nothing_is_due() -> None:
    assert rejected(locked(healthy()).decide(POLICY)) == (LOCK,)


def test_a_leaf_is_renewed_despite_a_locked_configuration() -> None:
    assert isinstance(locked(healthy(NOW, since=61 * DAY)).decide(POLICY), IssueLeaf)


def test_an_authority_that_a_locked_configuration_does_not_trust_is_not_promoted() -> None:
    taken, decision = locked(healthy(NOW, since=MINUTE)).go_on(StepRejected)
    assert rejected(decision) == (LOCK,)
    assert taken == [MakeAuthority, SetBundles]


@cases("restored", both_Secrets_deleted=False, CA_Secret_restored_from_a_backup=True)
def test_a_broken_leaf_that_a_locked_configuration_trusts_is_not_replaced(restored: bool) -> None:
    """A locked configuration is one that the rotation must not write, so it would not trust a new certificate."""
    world = locked(healthy(NOW, since=MINUTE))
    world.put(authorities=Authorities(current=make_authority(START - 2 * DAY)) if restored else Authorities())
    world.put(serving=world.state.serving if restored else Serving())
    taken, decision = world.go_on(StepRejected)
    assert not {Promote, IssueLeaf} & {*taken}
    assert rejected(decision) == (LOCK,)
    assert world.lost == []


def test_a_locked_configuration_that_may_trust_an_unreachable_endpoint_keeps_working() -> None:
    world = locked(healthy(NOW))
    world.put(serving=Serving())
    world.serve(None)
    world.look()
    policy = replace(POLICY, issued_before=START + HOUR)
    while isinstance(decision := world.decide(policy), MakeAuthority | SetBundles):
        world.take(policy)
        policy = POLICY
    assert not isinstance(decision, Promote)


def test_a_locked_configuration_that_never_trusted_the_served_leaf_blocks_no_rotation() -> None:
    """An earlier installation left this configuration behind. Calls by it fail with every certificate."""
    world = healthy(NOW, since=MINUTE)
    *_, last = world.state.configurations
    hooks = tuple(replace(hook, name=f"old-{hook.name}", bundle=()) for hook in last.hooks)
    leftover = replace(last, name="leftover", read_only=LOCK, hooks=hooks)
    world.put(configurations=(*world.state.configurations, leftover))
    taken, decision = world.go_on(StepRejected)
    assert {Promote, Forget} <= {*taken}
    assert rejected(decision) == (LOCK,)
    assert world.lost == []


def test_an_authority_that_a_locked_configuration_trusts_is_not_removed() -> None:
    world = locked(rotated(Forget))
    world.put_hooks(-1, bundle=world.state.authorities.retired)
    assert rejected(world.decide()) == (LOCK,)
