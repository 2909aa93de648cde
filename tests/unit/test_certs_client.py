"""The pair that API servers present: nobody sees what they present, so what may be presented stays trusted."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from cryptography.x509 import ExtendedKeyUsage
from cryptography.x509.oid import ExtendedKeyUsageOID

from certs import parsing, state, steps
from certs.rotation import Rotation
from tests.rotation_world import LONG, SEEN_LONG, START, Pod, World
from vcuda.x509 import Names, common_name, is_ours, make_authority, make_client

DAY = timedelta(days=1)
NAME = "vcuda-quota-apiserver"
POLICY = steps.RotationPolicy(Names(), client=NAME)
NEW = replace(POLICY, issued_before=START + timedelta(seconds=30))


class ClientWorld(World):
    """The pods are API servers: they present what they were given last, and the rotation cannot ask them."""

    def read(self, now: Callable[[], Any]) -> state.State:
        leaf = self.state.serving.leaf
        pair = state.DialledEndpoint("secret/vcuda-client-tls", True, leaf.certificate if leaf else None)
        return replace(super().read(now), endpoints=(pair,))


def issued(*lags: timedelta, policy: steps.RotationPolicy = POLICY) -> ClientWorld:
    """A world with its first pair, given to an API server a lag; each later one is given to it so much later."""
    config_map = state.Configuration("ConfigMap", "vcuda-client-ca", "", (state.Hook(0, "ca.crt", ()),))
    world = ClientWorld(state.State(configurations=(config_map,)))
    world.go_on(steps.Done, policy)
    world.pods = [Pod(f"api-server-{number}", lag, world.leaf.certificate) for number, lag in enumerate(lags)]
    world.look()
    world.sleep(60)
    return world


def test_a_first_run_makes_a_client_certificate_of_the_name_and_publishes_its_own_ca() -> None:
    world = issued()
    usage = world.leaf.certificate.extensions.get_extension_for_class(ExtendedKeyUsage).value
    assert (common_name(world.leaf.certificate), list(usage)) == (NAME, [ExtendedKeyUsageOID.CLIENT_AUTH])
    assert common_name(world.current.certificate).startswith("vcuda quota client CA ")
    assert is_ours(world.current.certificate)
    assert [hook.bundle for hook in world.state.hooks()] == [(world.current.certificate,)]


def test_a_pair_of_another_name_is_issued_anew() -> None:
    assert isinstance(issued().decide(replace(POLICY, client="another")), steps.IssueLeaf)


def test_no_api_server_is_refused_that_is_given_each_pair_before_the_end_of_the_one_before() -> None:
    """Runs some days apart, for three years: the CA is replaced, and the first one is trusted no longer at last."""
    world = issued(timedelta(), 12 * DAY, 24 * DAY)
    first = world.current.certificate
    while world.time < START + 1000 * DAY:
        Rotation(world, POLICY, timedelta(minutes=5), world, lambda _: None, longest_sleep=600).run()
        world.sleep(4 * DAY.total_seconds())
    assert world.lost == []
    assert world.works()
    assert first not in {one for hook in world.state.hooks() for one in hook.bundle}


def replaced(policy: steps.RotationPolicy = NEW) -> ClientWorld:
    """A world with a new CA and a pair of it, which no API server has been given."""
    world = issued(LONG)
    while not isinstance(world.decide(policy), steps.Wait) or world.state.authorities.next_ca:
        world.go_on(steps.IssueLeaf, policy) if world.state.authorities.next_ca else world.take(policy)
    return world


def test_a_retired_ca_stays_trusted_until_no_leaf_of_it_can_be_valid() -> None:
    world = replaced()
    [old] = world.state.authorities.retired
    reason = "an API server that has not been given the new pair may present one of the retired CA"
    assert world.decide(NEW) == steps.Wait(reason, old.not_valid_after_utc)
    assert world.works()


def test_a_retired_ca_goes_after_the_retention_once_a_person_says_that_the_new_pair_is_installed() -> None:
    """What was said is noted: later runs need not be told again."""
    world = replaced()
    [old] = world.state.authorities.retired
    assert isinstance(world.take(replace(NEW, installed=True)), steps.NoteServed)
    assert isinstance(world.decide(NEW), steps.Wait)
    world.time += NEW.retention
    dropped = world.take(NEW)
    assert isinstance(dropped, steps.SetBundles)
    assert old not in dropped.bundles[0]
    assert isinstance(world.take(NEW), steps.Forget)


def test_a_ca_that_the_config_map_alone_knows_stays_though_an_earlier_replacement_was_installed() -> None:
    """The CA Secret was restored from a backup: the API servers may present a pair of the CA that was made since."""
    world = issued(LONG)
    newer = make_authority(START, client=True)
    world.put_hooks(bundle=(world.current.certificate, newer.certificate))
    world.put(
        authorities=replace(
            world.state.authorities, served=state.SeenSince(state.fingerprint(world.current.certificate), START)
        )
    )
    assert isinstance(world.decide(POLICY, SEEN_LONG), steps.Wait)


def test_the_webhooks_are_given_the_time_that_a_mounted_config_map_takes() -> None:
    """A pair that was lost is issued again only then, if its CA is new: the Secret and the CA were deleted."""
    world = issued(LONG)
    world.put(authorities=state.Authorities(), serving=state.Serving())
    for step in (steps.MakeAuthority, steps.SetBundles):
        assert isinstance(world.take(POLICY), step)
    seen = steps.SeenFor(timedelta(seconds=110), timedelta(seconds=110))
    wait = world.decide(POLICY, seen)
    assert isinstance(wait, steps.Wait)
    assert wait.reason == "the webhooks are given a moment to read the caBundles"
    assert wait.until == world.time + timedelta(seconds=10)


CAS = make_authority(START, client=True).certificate_pem().decode()


@pytest.mark.parametrize(
    ("config_map", "found"),
    [
        pytest.param(None, (0, False, False), id="not there yet"),
        pytest.param({"metadata": {}, "data": None}, (0, False, False), id="empty"),
        pytest.param(
            {"metadata": {"labels": {parsing.MANAGED_BY: parsing.OURS}}, "data": {"ca.crt": CAS}},
            (1, False, False),
            id="ours",
        ),
        pytest.param({"metadata": {}, "data": {"ca.crt": CAS}}, (1, False, True), id="somebody else's"),
        pytest.param(
            {"metadata": {"labels": {parsing.MANAGED_BY: parsing.OURS}}, "data": {"ca.crt": f"{CAS}words"}},
            (1, True, False),
            id="more than certificates",
        ),
    ],
)
def test_what_a_config_map_publishes(config_map: dict[str, Any] | None, found: tuple[int, bool, bool]) -> None:
    """So many CAs; whether it has to be mended; whether it may not be written, being somebody else's."""
    read = parsing.read_client_cas(config_map, "vcuda-client-ca", "vcuda-quota")
    [hook] = read.hooks
    assert (len(hook.bundle), hook.faulty, bool(read.read_only)) == found


def test_a_client_certificate_is_signed_by_its_authority_for_no_longer_than_that_lives() -> None:
    authority = make_authority(START, DAY, client=True)
    leaf = make_client(authority, NAME, START)
    assert state.signed_by(leaf.certificate, authority.certificate)
    assert leaf.expires == authority.expires
