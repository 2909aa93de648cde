"""The names of resource.k8s.io. This module imports nothing, because the kubectl plugin needs it too."""

GROUP = "resource.k8s.io"
API_VERSION = f"{GROUP}/v1"
"""The version of the API that is read. Kubernetes serves it from 1.34 on, and converts objects of other versions."""

API_PATH = f"/apis/{API_VERSION}"

CLAIM, TEMPLATE = "ResourceClaim", "ResourceClaimTemplate"

PRODUCT, TYPE, PROFILE = "productName", "type", "profile"
"""Attributes in the domain of a driver: the card's name from NVML, the kind of the device, and its MIG profile."""
