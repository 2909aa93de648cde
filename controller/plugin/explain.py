"""What would become of pods and claims in a cluster now: asked by dry runs, of which nothing remains."""

import re
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus

import msgspec

from vcuda import errors
from vcuda.claims import objects, pin
from vcuda.k8s_types import Pod
from vcuda.kube import Heard, Kube, is_served, segment
from vcuda.placement import choice, patches
from vcuda.workloads import Manifest, Workload, made_claims

ADMITTED, REFUSED, NOT_ASKED = "admitted", "refused", "not asked"

PROBE = "_gpuquota-explain"
"""No name of a pod or a claim, as it begins with ``_``."""

# HAMi-DRA names its claim NAMESPACE-POD-CONTAINER, and cuts it off behind 54 characters.
MOST_OF_NAMESPACE = 50

MAKES_A_CLAIM = (
    "HAMi-DRA's webhook would make a ResourceClaim of it, dry run or not, and leave it behind: ask vcuda-webhook check"
)
TOO_LONG = (
    "whether HAMi-DRA's webhook would make a ResourceClaim of it, dry run or not, cannot be told in a namespace with a"
    " name of more than 50 characters: ask vcuda-webhook check"
)
NOT_SERVED = "this cluster has no resource.k8s.io/v1, and so no ResourceClaims: they need Kubernetes 1.34 or later"

_FORECAST = re.compile(f"{choice.would_be_pinned('')}([^ :]+)(?:: |$)")


class ExplainedObject(msgspec.Struct, frozen=True):
    """What would become of a pod or a claim; ``reason`` and ``warnings`` are mostly the cluster's own sentences."""

    object: str
    namespace: str
    decision: str
    model: str
    reason: str
    warnings: tuple[str, ...] = ()


def ask_about(kube: Kube, workloads: Sequence[Workload]) -> Iterator[ExplainedObject]:
    """Yield what would become of one pod of each workload, behind it of the claims made for it, and of other claims.

    Raises:
        VcudaError: the cluster did not answer, or does not know who asks.

    """
    templates = {(each.namespace, each.name): each.claim_spec for each in workloads}
    for workload in workloads:
        name, created = f"{workload.kind}/{workload.name}", workload.created
        is_pod = created["kind"] == "Pod"
        explained = _explain_pod(kube, name, created) if is_pod else _explain_claim(kube, name, created)
        if workload.warning:
            explained = msgspec.structs.replace(explained, warnings=(workload.warning, *explained.warnings))
        yield explained
        if is_pod and explained.decision == ADMITTED:
            yield from _explain_made(kube, created, templates)


def _explain_made(
    kube: Kube, pod: Manifest, templates: Mapping[tuple[str, str], Manifest | None]
) -> Iterator[ExplainedObject]:
    namespace = pod["metadata"]["namespace"]
    for name, template, claim in made_claims(pod):
        try:
            spec = templates.get((namespace, template)) or _read_template(kube, namespace, template)
        except errors.ApiError as error:
            reason = f"{objects.TEMPLATE} {template}, of which it is made, cannot be read: {error}"
            yield ExplainedObject(f"{objects.CLAIM}/{name}", namespace, NOT_ASKED, "", reason)
        else:
            yield _explain_claim(kube, f"{objects.CLAIM}/{name}", {**claim, "spec": spec})


def _read_template(kube: Kube, namespace: str, name: str) -> Manifest:
    path = f"{objects.API_PATH}/namespaces/{segment(namespace)}/resourceclaimtemplates/{segment(name)}"
    template: Manifest = msgspec.json.decode(kube.get(path))
    spec: Manifest = template["spec"]["spec"]
    return spec


def _explain_pod(kube: Kube, name: str, pod: Manifest) -> ExplainedObject:
    namespace = pod["metadata"]["namespace"]
    path = f"/api/v1/namespaces/{segment(namespace)}/pods"
    view = msgspec.convert(pod, Pod)
    # HAMi-DRA goes by the limits of ordinary containers, under names of its own configuration.
    limits = (each.resources.limits or {} for each in view.spec.containers or () if each.resources)
    if any("/" in resource for found in limits for resource in found):
        if len(namespace) > MOST_OF_NAMESPACE:
            return ExplainedObject(name, namespace, NOT_ASKED, "", TOO_LONG)
        if refusal := _probe(kube, path, pod):
            if _names_a_claim(refusal):
                return ExplainedObject(name, namespace, NOT_ASKED, "", MAKES_A_CLAIM)
            # What refuses this before the name is looked at does the same to the pod.
            given = pod["metadata"].get("name") or pod["metadata"].get("generateName", "")
            return ExplainedObject(name, namespace, REFUSED, "", refusal.replace(PROBE, given))
    answer = _dry_run(kube, path, pod)
    if isinstance(answer, errors.ApiError):
        return ExplainedObject(name, namespace, REFUSED, "", str(answer))
    chosen = msgspec.json.decode(answer.body, type=Pod).annotations.get(patches.MODEL_ANNOTATION, "")
    otherwise = "held to a GPU quota are its claims" if view.spec.resource_claims else "not held by a GPU quota"
    return _admitted(name, namespace, chosen, answer.warnings, otherwise)


def _probe(kube: Kube, path: str, pod: Manifest) -> str | None:
    """Return why a pod like this is refused before its name is looked at; None where it is not."""
    # Its name can be none, so nothing can come of it: no pod, and no claim that a webhook names after it. The API
    # server validates names only behind the mutating webhooks.
    try:
        answer = _dry_run(kube, path, {**pod, "metadata": {**pod["metadata"], "name": PROBE}})
    except errors.Unavailable as error:
        if _names_a_claim(str(error)):  # HAMi-DRA fails with 500
            return str(error)
        raise
    if not isinstance(answer, errors.ApiError):
        return None
    text = str(answer)
    of_its_name = answer.status == HTTPStatus.UNPROCESSABLE_ENTITY and "metadata.name: Invalid value" in text
    return None if of_its_name else text


def _names_a_claim(refusal: str) -> bool:
    """Return whether this is HAMi-DRA's webhook, which tells of the claim that it could not make."""
    return "mutate.hami.io" in refusal or (PROBE in refusal and "resourceclaim" in refusal.lower())


def _explain_claim(kube: Kube, name: str, claim: Manifest) -> ExplainedObject:
    """Return what would become of a claim, or of a template of claims."""
    namespace, is_template = claim["metadata"]["namespace"], claim["kind"] == objects.TEMPLATE
    collection = "resourceclaimtemplates" if is_template else "resourceclaims"
    answer = _dry_run(kube, f"{objects.API_PATH}/namespaces/{segment(namespace)}/{collection}", claim)
    if isinstance(answer, errors.ApiError):
        # It is also 404 where there is no such namespace.
        unserved = isinstance(answer, errors.NotFound) and not is_served(kube)
        return ExplainedObject(name, namespace, REFUSED, "", NOT_SERVED if unserved else str(answer))
    if is_template:
        return _admitted(name, namespace, "", answer.warnings, "held to a GPU quota are the claims that are made of it")
    forecasts = filter(None, map(_FORECAST.match, answer.warnings))
    chosen = next((found[1] for found in forecasts), None) or _held_to(answer.body)
    return _admitted(name, namespace, chosen, answer.warnings, "not held by a GPU quota")


def _held_to(body: bytes) -> str:
    # A quota that only audits warns of nothing. The first of a pin's patterns is its model, in lower case.
    requests = msgspec.json.decode(body, type=objects.ResourceClaim).spec.devices.requests or ()
    expressions = (text for each in requests for _, entry in each.entries() for text in entry.expressions)
    return next((each.patterns[0] for each in map(pin.read_pin, expressions) if each), "")


def _admitted(name: str, namespace: str, model: str, warnings: Sequence[str], otherwise: str) -> ExplainedObject:
    pinned = choice.would_be_pinned(model)
    told = [warning for warning in warnings if model and warning.startswith(pinned)]
    reason = next(iter(told), pinned if model else otherwise)
    others = tuple(warning for warning in warnings if warning not in told)
    return ExplainedObject(name, namespace, ADMITTED, model, reason, others)


def _dry_run(kube: Kube, path: str, manifest: Manifest) -> Heard | errors.ApiError:
    """Return the answer to a creation that is not kept; a refusal is one, by whomever, or for want of a right."""
    try:
        return kube.post_heard(path, msgspec.json.encode(manifest, enc_hook=str), {"dryRun": "All"})
    except errors.ApiError as error:
        if error.status == HTTPStatus.UNAUTHORIZED:
            raise
        return error
