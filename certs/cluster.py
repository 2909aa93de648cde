"""Reads the certificates of a rotation from a cluster and the webhook's endpoints. Writes Secrets and caBundles."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from http import HTTPStatus
from typing import Any

import msgspec

from certs import parsing, registration, state, steps
from vcuda import errors, k8s_types, tls, x509
from vcuda.kube import JSON_PATCH, MERGE_PATCH, Kube, endpoints, objects, segment
from vcuda.registration import ANNOTATION, UnusableDeclaration

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
KINDS = {
    "MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "validatingwebhookconfigurations",
}

# The timeout of a request to the API server. It is long, because no user waits for the rotation of certificates.
REQUEST_TIMEOUT_SECONDS = 30.0

APPLY_AGAIN = (
    "helm upgrade vcuda-quota manifests/chart --namespace kube-system --reset-then-reuse-values,"
    " or kubectl apply -k manifests/base if kustomize installed vcuda quota"
)

_LABELS = {tls.WRITTEN_BY: tls.OURS}


def dial_all(addresses: Mapping[str, bool], server_name: str) -> tuple[state.DialledEndpoint, ...]:
    """Read the certificates of endpoints. ``addresses``: HOST:PORT of each, with True if the endpoint is ready."""
    leaves = tls.served_leaves(addresses, server_name)
    return tuple(
        state.DialledEndpoint(address, ready, leaf, fault and f"the endpoint cannot be dialled: {fault}")
        for (address, ready), (leaf, fault) in zip(addresses.items(), leaves, strict=True)
    )


@dataclass(frozen=True, slots=True)
class ClusterStore:
    """Reads and writes the Secrets and the webhook configurations of one Service, and dials its endpoints.

    ``labels``: vcuda-certs manages the webhook configurations that have all these labels.
    ``addresses``: HOST:PORT of each endpoint to dial. If empty, the endpoints of the Service are dialled.
    ``registers_only``: True if another tool issues the certificates. The CA Secret is then not read.
    """

    kube: Kube
    refs: parsing.ObjectRefs
    labels: Mapping[str, str]
    port_name: str = "https"
    addresses: tuple[str, ...] = ()
    registers_only: bool = False

    def read(self, now: Callable[[], datetime]) -> state.State:
        """Read all objects of the rotation, dial each endpoint, and return their state. Raises VcudaError."""
        # The CA Secret is read last. If another run adds a CA to the CA Secret and to the caBundles during these reads,
        # this run reads the new CA too. If another run changes the serving Secret during these reads, a later write of
        # this run to the Secret raises Conflict.
        serving = self._read("secrets", self.refs.serving_secret)
        listed = {kind: self._list(resource) for kind, resource in KINDS.items()}
        tool = parsing.other_tool(serving) if serving else ""
        ours, left, mixed = self._configurations({kind: items for kind, (items, _) in listed.items()}, tool)
        clock = _clock_problem(listed["MutatingWebhookConfiguration"][1], now())
        if tool:
            left = (f"{tool} issues the certificates, because it manages Secret {self.refs.serving_secret}", *left)
        if tool or self.registers_only:
            issuers = parsing.read_serving(serving).authorities if serving else ()
            return state.State(
                serving=state.Serving(authorities=issuers, fault=""),
                configurations=ours,
                endpoints=self.dial(),
                left_alone=left,
                tool=tool,
                problems=mixed,
            )
        authorities = self._read("secrets", self.refs.authority_secret)
        return state.State(
            authorities=parsing.read_authorities(authorities) if authorities else state.Authorities(),
            serving=parsing.read_serving(serving) if serving else state.Serving(),
            configurations=ours,
            endpoints=self.dial(),
            left_alone=left,
            problems=(*self._secret_problems(serving, authorities), *clock, *mixed),
        )

    def missing(self, found: state.State) -> tuple[state.Problem, ...]:
        """Return a problem for each missing webhook configuration and policy. ``found``: the state that was read.

        Return none if a labelled webhook configuration calls the Service without a declaration of its webhooks. Its
        owner then decides what is registered. `read` returns the problems of existing configurations.
        """
        if any(each.hooks and not each.declared and not each.read_only for each in found.configurations):
            return ()
        present = {(each.kind, each.name) for each in found.configurations}
        missing = (each for each in objects.missing_registration(self.kube) if (each.kind, each.name) not in present)
        return tuple(state.Problem(str(each), APPLY_AGAIN) for each in missing)

    def running_job(self, program: str) -> str:
        """Return the name of a Job of the program that runs now; empty if there is none, or if Jobs cannot be read."""
        path = f"/apis/batch/v1/namespaces/{segment(self.refs.namespace)}/jobs"
        try:
            jobs = _decoded(self.kube.get(path, timeout=REQUEST_TIMEOUT_SECONDS)).get("items") or []
        except errors.ApiError:
            return ""
        running = (str(job["metadata"]["name"]) for job in jobs if (job.get("status") or {}).get("active"))
        return next((name for name in running if name.startswith(f"{program}-")), "")

    def dial(self) -> tuple[state.DialledEndpoint, ...]:
        refs = self.refs
        found = dict.fromkeys(self.addresses, True) or endpoints.service_addresses(
            self.kube, refs.namespace, refs.service, self.port_name, REQUEST_TIMEOUT_SECONDS
        )
        # The API server calls a webhook by this DNS name of its Service, so the certificate must have the name.
        return dial_all(found, f"{refs.service}.{refs.namespace}.svc")

    def write(self, write: steps.Write) -> None:
        """Make one write. Raises Conflict if the object has changed since the last `read`, or another VcudaError."""
        match write:
            case steps.WriteAuthorities(after):
                data = {
                    **_pair("ca", after.current),
                    **_pair("next", after.next_ca),
                    "retired.crt": parsing.write_certificates(after.retired) or None,
                }
                annotations = {
                    parsing.TRUSTED: parsing.format_seen_since(after.trusted),
                    parsing.SERVED: parsing.format_seen_since(after.served),
                }
                self._write_secret(self.refs.authority_secret, after.version, "Opaque", data, annotations)
            case steps.WriteServing(version, leaf, authorities):
                data = {**_pair("tls", leaf), "ca.crt": parsing.write_certificates(authorities)}
                self._write_secret(self.refs.serving_secret, version, parsing.TLS_TYPE, data, {})
            case steps.RegisterWebhooks():
                webhooks = registration.with_bundles(write.declared.webhooks, write.bundles)
                self._patch(_path_of(write.target), _patch_of(write.target, webhooks), JSON_PATCH)
            case steps.SetBundles():
                self._write_bundles(write)

    def _configurations(
        self, listed: dict[str, list[parsing.Json]], tool: str
    ) -> tuple[tuple[state.Configuration, ...], tuple[str, ...], tuple[state.Problem, ...]]:
        """Return the webhook configurations of this rotation, messages about ignored webhooks, and problems.

        ``tool``: the other tool that manages the serving Secret; empty if vcuda-certs manages the Secret. If one
        tool manages the serving Secret, and another tool manages the caBundles, this is a problem.
        """
        # Configurations without the label are read too. If they call the Service, a new CA could break these calls.
        ours: list[state.Configuration] = []
        left: list[str] = []
        mixed: list[state.Problem] = []
        for kind, items in listed.items():
            for item in items:
                configuration, elsewhere = parsing.read_configuration(item, kind, self.refs)
                other = parsing.other_tool(item)
                if not parsing.is_labelled(item, self.labels):
                    ours += [self._unlabelled(configuration)] if configuration.hooks and not other and not tool else []
                    continue
                if self.registers_only or other in ("", tool):
                    ours.append(self._with_declared(configuration, item))
                left += [f"{other} manages the caBundles of {configuration}"] if other else elsewhere
                if other != tool and not self.registers_only and (configuration.hooks or registration.declares(item)):
                    mixed.append(_mixed(configuration, other, tool))
        return tuple(ours), tuple(left), tuple(mixed)

    def _with_declared(self, configuration: state.Configuration, item: parsing.Json) -> state.Configuration:
        show = f"kubectl get {configuration} -o yaml"
        try:
            declared = registration.declared(item, configuration.kind, self.refs)
            if declared is None:
                return configuration
            wanted = self._defaulted(configuration, declared)
        except UnusableDeclaration as error:
            text = f"annotation {ANNOTATION} of {configuration} is unusable: {error}; apply the manifests again"
            return replace(configuration, read_only=state.Problem(text, show))
        except errors.Forbidden as error:
            text = f"{configuration} may not be written: {error.request}: {error}"
            return replace(configuration, read_only=state.Problem(text, steps.Commands().allow))
        difference = registration.difference(wanted, registration.registered(item))
        return replace(configuration, declared=replace(declared, difference=difference))

    def _defaulted(
        self, configuration: state.Configuration, declared: state.Declared
    ) -> Sequence[registration.Webhook]:
        # Return the declared webhooks with the API server's default values, from a dry run. Without these values, they
        # would seem to differ from the registered webhooks.
        path, patch = _path_of(configuration), _patch_of(configuration, declared.webhooks)
        try:
            answer = self._patch(path, patch, JSON_PATCH, {"dryRun": "All"})
        except errors.ApiError as error:
            if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:
                raise UnusableDeclaration(error.message) from error
            raise
        return registration.registered(_decoded(answer))

    def _unlabelled(self, configuration: state.Configuration) -> state.Configuration:
        # A configuration that calls the Service but lacks the label may belong to another owner. So vcuda-certs must
        # not write this configuration.
        kind, name = configuration.kind.lower(), configuration.name
        label = " ".join(f"{key}={value}" for key, value in self.labels.items())
        text = f"{configuration} calls the Service but lacks the label {label}, so its caBundles are not updated"
        return replace(configuration, read_only=state.Problem(text, f"kubectl label {kind} {name} {label} --overwrite"))

    def _secret_problems(
        self, serving: parsing.Json | None, authorities: parsing.Json | None, wanted: str | None = parsing.TLS_TYPE
    ) -> tuple[state.Problem, ...]:
        kinds = ((serving, wanted), (authorities, None))
        found = (parsing.secret_problem(secret, self.refs, wanted) for secret, wanted in kinds if secret)
        return tuple(filter(None, found))

    def _read(self, resource: str, name: str) -> parsing.Json | None:
        try:
            return _decoded(self.kube.get(self._path(resource, name), timeout=REQUEST_TIMEOUT_SECONDS))
        except errors.NotFound:
            return None

    def _list(self, resource: str) -> tuple[list[parsing.Json], datetime | None]:
        heard = self.kube.get_heard(f"{ADMISSION}/{resource}", timeout=REQUEST_TIMEOUT_SECONDS)
        return _decoded(heard.body).get("items") or [], heard.date

    def _write_secret(
        self, name: str, version: str, secret_type: str, data: Mapping[str, bytes | None], annotations: parsing.Json
    ) -> None:
        encoded = {key: value and base64.b64encode(value).decode() for key, value in data.items()}
        self._write_object({"kind": "Secret", "type": secret_type}, name, version, encoded, annotations)

    def _write_object(
        self, form: dict[str, str], name: str, version: str, data: parsing.Json, annotations: parsing.Json
    ) -> None:
        """Create the object if ``version`` is empty; otherwise change it. A key with value None is removed."""
        resource = f"{form['kind'].lower()}s"
        if version:
            metadata = {"resourceVersion": version, "labels": _LABELS, "annotations": annotations}
            self._patch(self._path(resource, name), {"metadata": metadata, "data": data}, MERGE_PATCH)
            return
        metadata = {"name": name, "labels": _LABELS, "annotations": _present(annotations)}
        manifest = {"apiVersion": "v1", **form, "metadata": metadata, "data": _present(data)}
        self.kube.post(self._path(resource), msgspec.json.encode(manifest), timeout=REQUEST_TIMEOUT_SECONDS)

    def _write_bundles(self, write: steps.SetBundles) -> None:
        bundles = [
            {
                "op": "add",
                "path": f"/webhooks/{hook.index}/clientConfig/caBundle",
                "value": base64.b64encode(parsing.write_certificates(bundle)).decode(),
            }
            for hook, bundle in zip(write.target.hooks, write.bundles, strict=True)
        ]
        self._patch(_path_of(write.target), [_guard(write.target.version), *bundles], JSON_PATCH)

    def _patch(self, path: str, body: object, content_type: str, params: Mapping[str, str] | None = None) -> bytes:
        encoded = msgspec.json.encode(body)
        try:
            return self.kube.patch(path, encoded, content_type, params, timeout=REQUEST_TIMEOUT_SECONDS)
        except errors.NotFound as error:
            # Another process has deleted the object after this run read it. The Conflict makes the caller read the
            # state again.
            raise errors.Conflict(error.status, error.message, request=error.request) from error

    def _path(self, resource: str, *name: str) -> str:
        return "/".join([f"/api/v1/namespaces/{segment(self.refs.namespace)}/{resource}", *map(segment, name)])


@dataclass(frozen=True, slots=True)
class ClientStore(ClusterStore):
    """Reads and writes the client certificate that API servers present, and the ConfigMap with the CAs for the webhook.

    ``config_map``: the name of this ConfigMap. The webhook reads the CAs by its flag --client-ca.
    """

    config_map: str = "vcuda-client-ca"

    def read(self, now: Callable[[], datetime]) -> state.State:
        # The CA Secret is read last, because another run may change it meanwhile (see `ClusterStore.read`).
        serving = self._read("secrets", self.refs.serving_secret)
        published = self._read("configmaps", self.config_map)
        authorities = self._read("secrets", self.refs.authority_secret)
        date = self.kube.get_heard("/version", timeout=REQUEST_TIMEOUT_SECONDS).date
        found = parsing.read_serving(serving) if serving else state.Serving()
        # This program cannot see the API servers' certificates. Assume that they present the certificate in the Secret.
        pair = f"secret/{self.refs.serving_secret}"
        return state.State(
            authorities=parsing.read_authorities(authorities) if authorities else state.Authorities(),
            serving=found,
            configurations=(parsing.read_client_cas(published, self.config_map, self.refs.namespace),),
            endpoints=(state.DialledEndpoint(pair, True, found.leaf.certificate if found.leaf else None, found.fault),),
            # The type of the Secrets is not checked. The manifests contain them without data, so that vcuda-certs needs
            # no right to create Secrets, and the API server rejects an empty Secret of type kubernetes.io/tls.
            problems=(*self._secret_problems(serving, authorities, None), *_clock_problem(date, now())),
        )

    def pair(self) -> x509.Signed:
        """Return the client certificate in the Secret, with its key. Raises VcudaError if one of them is unusable."""
        secret = self._read("secrets", self.refs.serving_secret)
        found = parsing.read_serving(secret) if secret else state.Serving()
        if found.leaf is None:
            raise errors.Unavailable(
                f"Secret {self.refs.serving_secret}: {found.fault}; run vcuda-certs client rotate first"
            )
        return found.leaf

    def _write_bundles(self, write: steps.SetBundles) -> None:
        [bundle] = write.bundles
        data = {parsing.CLIENT_CA_KEY: parsing.write_certificates(bundle).decode()}
        self._write_object({"kind": "ConfigMap"}, write.target.name, write.target.version, data, {})


def _path_of(target: state.Configuration) -> str:
    return f"{ADMISSION}/{KINDS[target.kind]}/{segment(target.name)}"


def _patch_of(target: state.Configuration, webhooks: Sequence[registration.Webhook]) -> list[object]:
    return [_guard(target.version), {"op": "add", "path": "/webhooks", "value": webhooks}]


def _guard(version: str) -> object:
    # This operation of a JSON Patch makes the API server reject the patch if the object has changed since `version`.
    return {"op": "replace", "path": "/metadata/resourceVersion", "value": version}


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except k8s_types.UNDECODABLE as error:
        raise errors.Unavailable(f"the answer is not a JSON object: {error}") from error


def _clock_problem(date: datetime | None, now: datetime) -> tuple[state.Problem, ...]:
    # On a machine with a wrong clock, valid certificates would seem expired, and new certificates would be issued for
    # the future.
    if date is None or abs(date - now) < x509.BACKDATE:
        return ()
    text = (
        f"this machine's clock shows {now:%Y-%m-%d %H:%M:%S} UTC, but the API server's clock shows "
        f"{date:%Y-%m-%d %H:%M:%S} UTC; correct the wrong clock and run the command again"
    )
    return (state.Problem(text, "timedatectl set-ntp true"),)


def _mixed(configuration: state.Configuration, tool: str, secrets_tool: str) -> state.Problem:
    text = (
        f"{tool or tls.OURS} manages the caBundles of {configuration}, but {secrets_tool or tls.OURS} manages "
        "the serving Secret; let one tool manage both"
    )
    return state.Problem(text, f"kubectl get {configuration} -o yaml")


def _pair(name: str, pair: x509.Signed | None) -> dict[str, bytes | None]:
    certificate, key = (pair.certificate_pem(), pair.key_pem()) if pair else (None, None)
    return {f"{name}.crt": certificate, f"{name}.key": key}


def _present(fields: parsing.Json) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
