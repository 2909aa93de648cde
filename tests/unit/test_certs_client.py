"""Tests of the rotation of the client certificate that API servers present to the webhook.

The rotation cannot see which certificate the API servers present. So every certificate that may be in use stays
trusted.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from cryptography.x509 import ExtendedKeyUsage
from cryptography.x509.oid import ExtendedKeyUsageOID

from certs import parsing, state, steps
from certs.rotation import Rotation
from tests.rotation_world import LONG, SEEN_LONG, START, Pod, World
from tests.tables import cases
from vcuda.tls import OURS, WRITTEN_BY
from vcuda.x509 import Names, common_name, is_ours, make_authority

DAY = timedelta(days=1)
NAME = "vcuda-quota-apiserver"
POLICY = steps.RotationPolicy(Names(), client=NAME)
NEW = replace(POLICY, issued_before=START + timedelta(seconds=30))


class ClientWorld(World):
    """A simulated cluster whose pods are API servers. The rotation cannot see which certificates they present."""

    def read(self, now: Callable[[], Any]) -> state.State:
        leaf = self.state.serving.leaf
        pair = state.DialledEndpoint("secret/vcuda-client-tls", True, leaf.certificate if leaf else None)
        return replace(super().read(now), endpoints=(pair,))


def issued(*lags: timedelta, policy: steps.RotationPolicy = POLICY) -> ClientWorld:
    """Return a world with a client certificate. Each API server uses a new certificate only after its lag."""
    config_map = state.Configuration("ConfigMap", "vcuda-client-ca", "", (state.Hook(0, "ca.crt", ()),))
    world = ClientWorld(state.State(configurations=(config_map,)))
    world.go_on(steps.Done, policy)
    world.pods = [Pod(f"api-server-{number}", lag, world.leaf.certificate) for number, lag in enumerate(lags)]
    world.look()
    world.sleep(60)
    return world


def test_a_first_run_issues_a_client_certificate_with_the_name_and_publishes_its_ca() -> None:
    world = issued()
    usage = world.leaf.certificate.extensions.get_extension_for_class(ExtendedKeyUsage).value
    assert (common_name(world.leaf.certificate), list(usage)) == (NAME, [ExtendedKeyUsageOID.CLIENT_AUTH])
    assert common_name(world.current.certificate).startswith("vcuda quota client CA ")
    assert is_ours(world.current.certificate)
    assert [hook.bundle for hook in world.state.hooks()] == [(world.current.certificate,)]


def test_a_client_certificate_with_another_name_is_replaced() -> None:
    assert isinstance(issued().decide(replace(POLICY, client="another")), steps.IssueLeaf)


def test_no_api_server_is_rejected_that_gets_each_certificate_before_the_last_one_expires() -> None:
    """The rotation runs every four days for three years. In the end the first CA is no longer trusted."""
    world = issued(timedelta(), 12 * DAY, 24 * DAY)
    first = world.current.certificate
    while world.time < START + 1000 * DAY:
        Rotation(world, POLICY, timedelta(minutes=5), world, lambda _: None, longest_sleep=600).run()
        world.sleep(4 * DAY.total_seconds())
    assert world.lost == []
    assert world.works()
    assert first not in {one for hook in world.state.hooks() for one in hook.bundle}


def replaced(policy: steps.RotationPolicy = NEW) -> ClientWorld:
    """Return a world with a new CA and a client certificate of this CA. No API server has received it yet."""
    world = issued(LONG)
    while not isinstance(world.decide(policy), steps.Wait) or world.state.authorities.next_ca:
        world.go_on(steps.IssueLeaf, policy) if world.state.authorities.next_ca else world.take(policy)
    return world


def test_a_retired_ca_stays_trusted_until_no_leaf_of_it_can_be_valid() -> None:
    world = replaced()
    [old] = world.state.authorities.retired
    reason = "an API server that lacks the new certificate may present a certificate of the retired CA"
    assert world.decide(NEW) == steps.Wait(reason, old.not_valid_after_utc)
    assert world.works()


def test_a_retired_ca_is_removed_after_the_retention_when_the_new_certificate_is_confirmed() -> None:
    """The first run records that the certificate is in use. So later runs do not need the option that confirms it."""
    world = replaced()
    [old] = world.state.authorities.retired
    assert isinstance(world.take(replace(NEW, installed=True)), steps.NoteServed)
    assert isinstance(world.decide(NEW), steps.Wait)
    world.time += NEW.retention
    dropped = world.take(NEW)
    assert isinstance(dropped, steps.SetBundles)
    assert old not in dropped.bundles[0]
    assert isinstance(world.take(NEW), steps.Forget)


def test_a_ca_that_is_only_in_the_config_map_stays_despite_an_earlier_confirmation() -> None:
    """The CA Secret was restored from a backup, and the API servers may present certificates of a newer CA."""
    world = issued(LONG)
    newer = make_authority(START, client=True)
    world.put_hooks(bundle=(world.current.certificate, newer.certificate))
    world.put(
        authorities=replace(
            world.state.authorities, served=state.SeenSince(state.fingerprint(world.current.certificate), START)
        )
    )
    assert isinstance(world.decide(POLICY, SEEN_LONG), steps.Wait)


def test_a_new_ca_waits_until_mounted_config_maps_have_it() -> None:
    """The Secrets of the CA and of the certificate were deleted, so the rotation creates a new CA."""
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


@cases(
    "config_map, found",
    no_ConfigMap_yet=(None, (0, False, False)),
    empty=({"metadata": {}, "data": None}, (0, False, False)),
    ours=({"metadata": {"labels": {WRITTEN_BY: OURS}}, "data": {"ca.crt": CAS}}, (1, False, False)),
    somebody_elses=({"metadata": {}, "data": {"ca.crt": CAS}}, (1, False, True)),
    other_text_besides_certificates=(
        {"metadata": {"labels": {WRITTEN_BY: OURS}}, "data": {"ca.crt": f"{CAS}words"}},
        (1, True, False),
    ),
)
def test_the_cas_of_a_config_map_are_read(config_map: dict[str, Any] | None, found: tuple[int, bool, bool]) -> None:
    """``found``: the number of CAs; whether the ConfigMap needs a repair; whether another tool manages it."""
    read = parsing.read_client_cas(config_map, "vcuda-client-ca", "vcuda-quota")
    [hook] = read.hooks
    assert (len(hook.bundle), hook.faulty, bool(read.read_only)) == found
