"""Finds out by server-side dry runs whether a cluster would admit pods and claims now. A dry run stores nothing."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from controller.plugin.kubectl import Kubectl, Reply, in_path, read_json
from controller.plugin.published import published_of
from vcuda import errors
from vcuda.claims import pin
from vcuda.claims.names import API_PATH, CLAIM, TEMPLATE
from vcuda.quota.rejections import read_forecast, would_be_pinned
from vcuda.quota.well_known import MODEL_ANNOTATION
from vcuda.requests.folding import fold
from vcuda.workloads import Manifest, Unread, Workload, entries, made_claims

ADMITTED, REJECTED, NOT_ASKED = "admitted", "rejected", "not asked"

PROBE = "_gpuquota-explain"
"""The name of the pod in the probe, a first dry run. The name is invalid, so that no object can be created with it."""

# HAMi-DRA creates a claim named NAMESPACE-POD-CONTAINER for a pod, even in a dry run. With the invalid name `PROBE` for
# POD, this fails, as intended. But HAMi-DRA cuts the claim's name off after 54 characters. If NAMESPACE has more than
# 50 characters, the cut name may be valid.
MAX_NAMESPACE_OBJECTS = 50

MAKES_A_CLAIM = (
    "this pod was not tried, because even in a dry run HAMi-DRA's webhook would create a ResourceClaim for the pod,"
    " and would not delete the claim. Use `vcuda-webhook check` instead"
)
TOO_LONG = (
    "this pod was not tried, because even in a dry run HAMi-DRA's webhook may create a ResourceClaim for the pod. In a"
    " namespace whose name has more than 50 characters, the command cannot find out whether this happens. Use"
    " `vcuda-webhook check` instead"
)
NOT_SERVED = "this cluster does not serve ResourceClaims (resource.k8s.io/v1), which need Kubernetes 1.34 or later"


@dataclass(frozen=True, slots=True)
class ExplainedObject:
    """The decision about one pod or claim. ``reason`` and ``warnings`` are mostly texts from the API server."""

    object: str
    namespace: str
    decision: str
    model: str
    reason: str
    warnings: tuple[str, ...] = ()


def ask_about(api: Kubectl, workloads: Sequence[Workload | Unread]) -> Iterator[ExplainedObject]:
    """Yield a decision for one pod of each workload, for the claims of that pod, and for each claim or claim template.

    Raises VcudaError if the cluster does not answer or rejects the credentials.
    """
    templates = {(each.namespace, each.name): each.claim_spec for each in workloads if isinstance(each, Workload)}
    for workload in workloads:
        if isinstance(workload, Unread):
            yield ExplainedObject(workload.title, workload.namespace, NOT_ASKED, "", workload.reason)
            continue
        name, created = workload.title, workload.created
        is_pod = created["kind"] == "Pod"
        explained = _explain_pod(api, name, created) if is_pod else _explain_claim(api, name, created)
        if workload.warning:
            explained = replace(explained, warnings=(workload.warning, *explained.warnings))
        yield explained
        if is_pod and explained.decision == ADMITTED:
            yield from explain_made(api, created, templates)


def explain_made(
    api: Kubectl, pod: Manifest, templates: Mapping[tuple[str, str], Manifest | None]
) -> Iterator[ExplainedObject]:
    """Yield a decision for each claim that Kubernetes would create for a pod. ``templates``: specs of new templates."""
    namespace = pod["metadata"]["namespace"]
    for name, template, claim in made_claims(pod):
        try:
            spec = templates.get((namespace, template)) or _read_template(api, namespace, template)
        except errors.ApiError as error:
            reason = f"{TEMPLATE} {template} of this claim cannot be read: {error}"
            yield ExplainedObject(f"{CLAIM}/{name}", namespace, NOT_ASKED, "", reason)
        else:
            yield _explain_claim(api, f"{CLAIM}/{name}", {**claim, "spec": spec})


def _read_template(api: Kubectl, namespace: str, name: str) -> Manifest:
    path = f"{API_PATH}/namespaces/{in_path(namespace)}/resourceclaimtemplates/{in_path(name)}"
    template: Manifest = read_json(api.get(path))
    spec: Manifest = template["spec"]["spec"]
    return spec


def _explain_pod(api: Kubectl, name: str, pod: Manifest) -> ExplainedObject:
    namespace = pod["metadata"]["namespace"]
    path = f"/api/v1/namespaces/{in_path(namespace)}/pods"
    # HAMi-DRA may create a claim for a pod with a GPU limit. HAMi-DRA's resource names are configurable, so every
    # resource with a slash in its name may be a GPU.
    if any("/" in resource for each in entries(pod["spec"], "containers") for resource in _limits(each)):
        if len(namespace) > MAX_NAMESPACE_OBJECTS:
            return ExplainedObject(name, namespace, NOT_ASKED, "", TOO_LONG)
        if rejection := _probe(api, path, pod):
            if _names_a_claim(rejection):
                return ExplainedObject(name, namespace, NOT_ASKED, "", MAKES_A_CLAIM)
            # The probe was rejected, but not because of its invalid name. So the pod itself would be rejected, too.
            given = pod["metadata"].get("name") or pod["metadata"].get("generateName", "")
            existing = _existing(api, path, pod)
            return ExplainedObject(name, namespace, REJECTED, "", rejection.replace(PROBE, given), existing)
    answer, existing = _tried(api, path, pod)
    if isinstance(answer, errors.ApiError):
        return ExplainedObject(name, namespace, REJECTED, "", str(answer), existing)
    chosen = (read_json(answer.body)["metadata"].get("annotations") or {}).get(MODEL_ANNOTATION, "")
    claims = entries(pod["spec"], "resourceClaims")
    otherwise = "only the pod's claims count against a GPU quota" if claims else "no GPU quota applies"
    return _admitted(name, namespace, chosen, (*existing, *answer.warnings), otherwise)


def _probe(api: Kubectl, path: str, pod: Manifest) -> str | None:
    """Create the pod under an invalid name in a dry run. Return the rejection; None if only the name was rejected.

    The API server calls the mutating webhooks before it validates the name. If a webhook creates a claim for the pod,
    this webhook fails, because the claim's name would contain the pod's invalid name.
    """
    try:
        answer = _dry_run(api, path, {**pod, "metadata": {**pod["metadata"], "name": PROBE}})
    except errors.Unavailable as error:
        if _names_a_claim(str(error)):  # HAMi-DRA's webhook rejects with status 500, which raises Unavailable.
            return str(error)
        raise
    if not isinstance(answer, errors.ApiError):
        return None
    text = str(answer)
    of_its_name = answer.status == HTTPStatus.UNPROCESSABLE_ENTITY and "metadata.name: Invalid value" in text
    return None if of_its_name else text


def _names_a_claim(rejection: str) -> bool:
    """Return True if HAMi-DRA's webhook rejected the pod because it could not create a claim for the pod."""
    return "mutate.hami.io" in rejection or (PROBE in rejection and "resourceclaim" in rejection.lower())


def _explain_claim(api: Kubectl, name: str, claim: Manifest) -> ExplainedObject:
    namespace, is_template = claim["metadata"]["namespace"], claim["kind"] == TEMPLATE
    collection = "resourceclaimtemplates" if is_template else "resourceclaims"
    answer, existing = _tried(api, f"{API_PATH}/namespaces/{in_path(namespace)}/{collection}", claim)
    if isinstance(answer, errors.ApiError):
        # A 404 for a claim means that ResourceClaims are not served, or that the namespace does not exist.
        unserved = isinstance(answer, errors.NotFound) and not _is_served(api)
        return ExplainedObject(name, namespace, REJECTED, "", NOT_SERVED if unserved else str(answer), existing)
    warnings = (*existing, *answer.warnings)
    if is_template:
        return _admitted(name, namespace, "", warnings, "only this template's claims count against a GPU quota")
    chosen = next(filter(None, map(read_forecast, answer.warnings)), "") or pinned_model(api, namespace, answer.body)
    return _admitted(name, namespace, chosen, warnings, "no GPU quota applies")


def pinned_model(api: Kubectl, namespace: str, body: bytes) -> str:
    """Return the GPU model to which a claim is pinned; empty if there is none.

    If the published usage of the namespace does not name the model, its name is in lower case.
    """
    # If the namespace is in mode audit, no warning of the webhook names the GPU model. So the model is read from the
    # CEL selector that restricts the claim to a model. The first pattern in this selector is the model in lower case.
    devices = read_json(body)["spec"].get("devices") or {}
    requests = [
        entry
        for each in entries(devices, "requests")
        for entry in (each.get("exactly") or {}, *entries(each, "firstAvailable"))
    ]
    selectors = (each.get("cel") or {} for entry in requests for each in entries(entry, "selectors"))
    found = (pin.read_claim_pin(each.get("expression", "")) for each in selectors)
    folded = next((each.patterns[0] for each in found if each), "")
    with contextlib.suppress(errors.VcudaError):
        uses = published_of(api, namespace) if folded else ()
        models = (each.model for use in uses for each in use.models)
        return next((model for model in models if fold(model) == folded), folded)
    return folded


def _limits(container: Manifest) -> Mapping[str, Any]:
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    return limits if isinstance(limits, dict) else {}


def _is_served(api: Kubectl) -> bool:
    """Return True if the API server serves ResourceClaims. Raises VcudaError if it does not answer."""
    try:
        api.get(API_PATH)
    except errors.NotFound:
        return False
    return True


def _admitted(name: str, namespace: str, model: str, warnings: Sequence[str], otherwise: str) -> ExplainedObject:
    about_the_pin = [warning for warning in warnings if model and read_forecast(warning) == model]
    reason = next(iter(about_the_pin), would_be_pinned(model) if model else otherwise)
    others = tuple(warning for warning in warnings if warning not in about_the_pin)
    return ExplainedObject(name, namespace, ADMITTED, model, reason, others)


def _tried(api: Kubectl, path: str, manifest: Manifest) -> tuple[Reply | errors.ApiError, tuple[str, ...]]:
    """Create an object in a dry run, and return the answer. If the object exists, try another one like it.

    The second value is then a warning that the object exists.
    """
    answer = _dry_run(api, path, manifest)
    existing = _existing(api, path, manifest) if isinstance(answer, errors.ApiError) else ()
    if existing and isinstance(answer, errors.Conflict):
        metadata = {**manifest["metadata"], "generateName": f"{manifest['metadata']['name']}-"}
        del metadata["name"]
        answer = _dry_run(api, path, {**manifest, "metadata": metadata})
    return answer, existing


def _existing(api: Kubectl, path: str, manifest: Manifest) -> tuple[str, ...]:
    """Return a warning if an object of this name exists, otherwise an empty text."""
    name = manifest["metadata"].get("name")
    try:
        api.get(f"{path}/{in_path(str(name or ''))}")
    except (errors.ApiError, errors.BadInput):
        return ()
    return (f"{manifest['kind']}/{name} exists already, so the decision is about a second object like it",)


def _dry_run(api: Kubectl, path: str, manifest: Manifest) -> Reply | errors.ApiError:
    """Create an object in a server-side dry run. Return the answer, or an ApiError if the server rejects the object."""
    try:
        return api.post_heard(path, json.dumps(manifest).encode(), {"dryRun": "All"})
    except errors.ApiError as error:
        if error.status == HTTPStatus.UNAUTHORIZED:
            raise
        return error
