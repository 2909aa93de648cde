"""The names of resource.k8s.io. This module imports nothing, because the kubectl plugin needs it too."""

GROUP = "resource.k8s.io"
API_VERSION = f"{GROUP}/v1"
"""The API version that is read. Kubernetes serves it since 1.34, and converts objects of other versions to it."""

API_PATH = f"/apis/{API_VERSION}"

CLAIM, TEMPLATE = "ResourceClaim", "ResourceClaimTemplate"

PRODUCT, TYPE, PROFILE = "productName", "type", "profile"
"""Names of device attributes in a driver's domain: the product name of the card, the device type, the MIG profile."""
