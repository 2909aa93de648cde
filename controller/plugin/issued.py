"""Checks for ``kubectl gpuquota doctor`` of all certificates of an installation, and of the CronJobs that renew them.

The optional parts have certificates of their own. Each of them is in one Secret, which one CronJob renews.
"""

import base64
import datetime
from collections.abc import Iterator

from cryptography import x509

from controller import certificates
from controller.plugin.defects import Defect
from controller.plugin.installation import CERTIFICATES, CLIENT_CERTIFICATES, SECRET, WEBHOOK, Installation, Json
from vcuda.cli import whole_units
from vcuda.tls import AUTHORITY_CERTIFICATE, LEAF_CERTIFICATE, LEAF_KEY, OTHER_TOOLS, OURS, WRITTEN_BY
from vcuda.x509 import signed_by

SECRETS = {
    CERTIFICATES: SECRET,
    CLIENT_CERTIFICATES: "vcuda-client-tls",
    "vcuda-extender-certs": "vcuda-extender-tls",
    "vcuda-scheduler-certs": "vcuda-scheduler-tls",
}
"""The Secret that each CronJob renews."""

MAX_RESTARTS = 3
"""A pod of a Job counts as failing if its container has been restarted at least this many times."""

_HOURLY, _DAILY = datetime.timedelta(hours=2), datetime.timedelta(days=2)
"""The time without a successful Job after which the Jobs of a CronJob count as failing."""


def certificate_defects(seen: Installation) -> Iterator[Defect | str]:
    """Yield the faults of each certificate and its CronJob, and a text with the expiry of all certificates."""
    now, texts = datetime.datetime.now(datetime.UTC), list[str]()
    # An optional part is installed if its CronJob or the CronJob's account exists. Its Secret may outlive the part.
    installed = [name for name in SECRETS if name == CERTIFICATES or seen.cron_job(name) or seen.account(name)]
    for name in installed:
        yield from _secret(seen, name, now, texts)
    end = _expiry(seen.secret(SECRET))
    for each in seen.replicas:
        served = each.metrics.get("vcuda_serving_certificate_expiry_seconds")
        if served and end and abs(served - end.timestamp()) > 1:
            restart = f"If this lasts for minutes: {seen.kubectl(f'rollout restart deployment/{WEBHOOK}')}"
            yield Defect(f"pod {each.pod} serves another certificate than Secret {SECRET} has", restart)
    for name in installed:
        yield from _renewal(seen, name)
        yield from _failing_jobs(seen, name)
    yield "; ".join(texts)


def _secret(seen: Installation, job: str, now: datetime.datetime, texts: list[str]) -> Iterator[Defect]:
    """Yield the faults of the certificate that a CronJob renews. Append the expiry of the certificate to ``texts``."""
    name, renew = SECRETS[job], seen.renewal(job)
    where, secret = f"Secret {seen.system}/{name}", seen.secret(name)
    if secret is None:
        # Only the manifests create the Secrets of client certificates.
        yield Defect(f"{where} does not exist", renew if job == CERTIFICATES else f"{seen.apply}. Then: {renew}")
        return
    if lacking := [key for key in (LEAF_CERTIFICATE, LEAF_KEY) if not _data(secret, key)]:
        yield Defect(f"{where} has no {' and no '.join(lacking)}", renew)
        return
    metadata = secret["metadata"]
    others = [key for key in metadata.get("annotations") or () if key.startswith(tuple(OTHER_TOOLS))]
    if not others and (metadata.get("labels") or {}).get(WRITTEN_BY) != OURS:
        label = seen.kubectl(f"label secret {name} {WRITTEN_BY}={OURS}")
        yield Defect(f"{where} lacks the label {WRITTEN_BY}, so {OURS} does not renew it", label)
    leaves = _certificates(_data(secret, LEAF_CERTIFICATE))
    if not leaves:
        yield Defect(f"{LEAF_CERTIFICATE} in {where} is not a certificate", renew)
        return
    place, authorities = _authorities(seen, secret)
    signing = [each for each in authorities if any(signed_by(leaf, each) for leaf in leaves)]
    if not signing:
        yield Defect(f"no CA in {place} has signed the certificate in {where}", renew)
    for key, one in ((LEAF_CERTIFICATE, leaves[0]), *((AUTHORITY_CERTIFICATE, each) for each in signing[-1:])):
        left = one.not_valid_after_utc - now
        when = f"expires in {whole_units(left)}" if left.days >= 0 else f"expired {whole_units(-left)} ago"
        texts.append(f"{name}: {key} {when}, at {one.not_valid_after_utc:%FT%TZ}")
        period = certificates.ServedCertificate("", "", one.not_valid_before_utc, one.not_valid_after_utc)
        if certificates.is_late(period, now):
            yield Defect(f"{texts[-1]}, and was not renewed in time", renew)


def _authorities(seen: Installation, secret: Json) -> tuple[str, list[x509.Certificate]]:
    """Return where the CAs of a certificate are, and the CAs. The CAs of a client certificate are in a ConfigMap."""
    name = secret["metadata"]["name"]
    if text := _data(secret, AUTHORITY_CERTIFICATE):
        return f"Secret {seen.system}/{name}", _certificates(text)
    place = f"{name.removesuffix('-tls')}-ca"
    data = (seen.config_map(place) or {}).get("data") or {}
    return f"ConfigMap {seen.system}/{place}", _certificates(data.get(AUTHORITY_CERTIFICATE, "").encode())


def _data(secret: Json, key: str) -> bytes:
    return base64.b64decode((secret.get("data") or {}).get(key) or "")


def _certificates(text: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError:
        return []


def _expiry(secret: Json | None) -> datetime.datetime | None:
    leaves = _certificates(_data(secret, LEAF_CERTIFICATE)) if secret else []
    return leaves[0].not_valid_after_utc if leaves else None


def _renewal(seen: Installation, name: str) -> Iterator[Defect]:
    # With cert-manager the CronJob of the webhook's certificate still repairs the webhooks.
    job, where = seen.cron_job(name), f"CronJob {seen.system}/{name}"
    effect = f"so it renews no certificate{' and repairs no webhook' if name == CERTIFICATES else ''}"
    if job is None:
        yield Defect(f"{where} does not exist, {effect}", seen.apply)
        return
    if job["spec"].get("suspend"):
        resume = seen.kubectl(f"""patch cronjob {name} -p '{{"spec":{{"suspend":false}}}}'""")
        yield Defect(f"{where} is suspended, {effect}", resume)
    status = job.get("status") or {}
    since = status.get("lastSuccessfulTime") or job["metadata"]["creationTimestamp"]
    started = status.get("lastScheduleTime") or since
    failing = datetime.datetime.fromisoformat(started) - datetime.datetime.fromisoformat(since)
    if failing > (_HOURLY if name == CERTIFICATES else _DAILY):
        logs = seen.kubectl(f"logs -l app.kubernetes.io/name={name} --tail=50")
        yield Defect(f"no Job of {where} has succeeded since {since}", f"Read the log of its Jobs: {logs}")


def _failing_jobs(seen: Installation, name: str) -> Iterator[Defect]:
    for pod, each in seen.pods(name).items():
        restarts = max((one["restartCount"] for one in each["status"].get("containerStatuses", ())), default=0)
        if restarts >= MAX_RESTARTS:
            logs = seen.kubectl(f"logs {pod} --previous")
            yield Defect(f"pod {pod} has failed {restarts} times to renew certificates", f"Read its log: {logs}")
