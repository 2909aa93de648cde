"""The names of resource.k8s.io. This module imports nothing, because the kubectl plugin needs it too."""

GROUP = "resource.k8s.io"
API_VERSION = f"{GROUP}/v1"
"""The version that is read. Kubernetes has it from 1.34 on, and converts objects of other versions."""

API_PATH = f"/apis/{API_VERSION}"

CLAIM, TEMPLATE = "ResourceClaim", "ResourceClaimTemplate"

PRODUCT, TYPE, PROFILE = "productName", "type", "profile"
"""Attributes in a driver's own domain: the card's name from NVML, the kind of the device, its MIG profile."""
