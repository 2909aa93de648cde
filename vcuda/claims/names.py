"""The names of the API resource.k8s.io. This module imports nothing, so that the kubectl plugin can use it."""

GROUP = "resource.k8s.io"
API_VERSION = f"{GROUP}/v1"
"""The version of resource.k8s.io that is read. Kubernetes serves it since 1.34, and converts other versions to it."""

API_PATH = f"/apis/{API_VERSION}"

CLAIM, TEMPLATE = "ResourceClaim", "ResourceClaimTemplate"

PRODUCT, TYPE, PROFILE = "productName", "type", "profile"
"""Device attributes in the domain of the device's driver: the card's product name, the device type, the MIG profile."""
