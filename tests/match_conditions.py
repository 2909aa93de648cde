"""Example pods for the matchConditions in manifests/base, by which the API server calls the webhook for some pods."""

from pathlib import Path

import yaml

from tests.builders import Manifest, container, pod, sidecar
from vcuda.requests.runtime_devices import DEVICE_ANNOTATIONS

REGISTRATION = Path(__file__).parents[1] / "manifests" / "base" / "registration.yaml"
RUNTIME_CLASS = "nvidia"

PLAIN = container({"cpu": "1", "memory": "64Mi"})
HOST_PROCESS: Manifest = {"securityContext": {"windowsOptions": {"hostProcess": True}}}
GPU = container({"nvidia.com/gpu": "1"}, name="gpu")
CLAIM = {"name": "gpu", "resourceClaimName": "train"}

ORDINARY: dict[str, Manifest] = {
    "no resources": pod(container()),
    "nothing but empty fields": pod(container({}, env=[], securityContext={}), annotations={}, resourceClaims=[]),
    "cpu and memory": pod(PLAIN),
    "requests": pod(container(resources={"requests": {"cpu": "1"}})),
    "every resource without a slash": pod(
        container({"cpu": "1", "memory": "64Mi", "ephemeral-storage": "1Gi", "hugepages-2Mi": "2Mi"})
    ),
    "resources of the pod": pod(container(), resources={"limits": {"cpu": "2"}}),
    "init containers and sidecars": pod(PLAIN, init=[container(name="init"), sidecar({"cpu": "1"}, name="side")]),
    "variables": pod(
        container(
            env=[
                {"name": "NVIDIA"},
                {"name": "VISIBLE_DEVICES", "value": "nvidia.com/gpu"},
                {"name": "CUDA_VISIBLE_DEVICES"},
                {"name": "CUDA_VERSION_MAJOR", "value": "12"},
            ]
        )
    ),
    "annotations": pod(
        PLAIN, annotations={"prometheus.io/scrape": "true", "sidecar.istio.io/inject": "true", "note": "nvidia.com/gpu"}
    ),
    "annotations of other plugins": pod(
        PLAIN, annotations={"cdi.kubevirt.io/storage.import": "1", "io-priority.nri.io": "1", "devices.io": "1"}
    ),
    "labels": pod(PLAIN, labels={"nvidia.com/gpu": "1", "gpu-fraction": "1"}),
    "not privileged": pod(
        container(securityContext={"privileged": False, "capabilities": {"drop": ["ALL"]}}),
        securityContext={"runAsUser": 1000},
    ),
    "a user on Windows": pod(
        container(securityContext={"windowsOptions": {"hostProcess": False}}),
        securityContext={"windowsOptions": {"runAsUserName": "ContainerUser"}},
    ),
    "node selection": pod(PLAIN, nodeSelector={"nvidia.com/gpu.present": "true"}),
    "a toleration": pod(PLAIN, tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}]),
}
"""Pods that request no GPU in any way."""

ASKING: dict[str, Manifest] = {
    "a container": pod(PLAIN, GPU),
    "an init container": pod(PLAIN, init=[GPU]),
    "a sidecar": pod(PLAIN, init=[sidecar({"nvidia.com/gpu": "1"}, name="side")]),
    "a resource that no table has": pod(container({"example.com/accelerator": "1"})),
    "none of it": pod(container({"nvidia.com/gpu": "0"})),
    "requests and limits": pod(
        container(resources={"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}})
    ),
    "requests alone": pod(container(resources={"requests": {"deviceclass.resource.kubernetes.io/gpu": "1"}})),
    "a resource claim": pod(container(resources={"claims": [{"name": "gpu"}]}), resourceClaims=[CLAIM]),
    "a resource claim that no container uses": pod(PLAIN, resourceClaims=[CLAIM]),
    "a runtime class": pod(PLAIN, runtimeClassName=RUNTIME_CLASS),
    "a privileged container": pod(PLAIN, container(name="root", securityContext={"privileged": True})),
    "a privileged init container": pod(PLAIN, init=[container(name="root", securityContext={"privileged": True})]),
    "a HostProcess container": pod(container(**HOST_PROCESS), hostNetwork=True),
    "a HostProcess pod": pod(PLAIN, hostNetwork=True, **HOST_PROCESS),
    "a variable": pod(container(env=[{"name": "A"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])),
    "a variable of an init container": pod(
        PLAIN, init=[container(name="init", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}])]
    ),
    "another vendor's variable": pod(container(env=[{"name": "MTHREADS_VISIBLE_DEVICES", "value": "all"}])),
    "a legacy CUDA image": pod(PLAIN, container(name="side", env=[{"name": "CUDA_VERSION", "value": "12.4"}])),
    "control of MIG": pod(container(env=[{"name": "NVIDIA_MIG_CONFIG_DEVICES", "value": "all"}])),
    "KAI's share of a card": pod(PLAIN, annotations={"gpu-fraction": "0.5"}),
    "KAI's share in capitals": pod(PLAIN, annotations={"GPU-Fraction": "0.5"}),
    "KAI's share of a card's memory": pod(PLAIN, annotations={"note": "x", "gpu-memory": "2000"}),
    "HAMi's wanted type": pod(PLAIN, annotations={"nvidia.com/use-gputype": "A100"}),
    "HAMi's allocation": pod(PLAIN, annotations={"hami.io/vgpu-node": "gpu-1"}),
    "vgpu-manager's resources": pod(PLAIN, annotations={"vgpu-manager.io/original-resources": "{}"}),
    "a core limit": pod(PLAIN, annotations={"tencent.com/vcuda-core-limit": "50"}),
    "an annotation in capitals": pod(PLAIN, annotations={"ALIYUN_COM_GPU_MEM_IDX": "0"}),
    **{f"devices by {domain}": pod(PLAIN, annotations={domain: ""}) for domain in DEVICE_ANNOTATIONS},
    "devices of one container": pod(PLAIN, annotations={"devices.nri.io/container.a": "", "note": "x"}),
}
"""Pods that request a GPU, or to which another webhook might add one. So the webhook must be called for them."""


def declared(configuration: Manifest) -> list[Manifest]:
    webhooks: list[Manifest] = yaml.safe_load(configuration["metadata"]["annotations"]["quota.vcuda.io/webhooks"])
    return webhooks


def base_conditions(name: str) -> list[Manifest]:
    documents = yaml.safe_load_all(REGISTRATION.read_text())
    [found] = [hook for document in documents for hook in declared(document) if hook["name"] == name]
    conditions: list[Manifest] = found["matchConditions"]
    return conditions
