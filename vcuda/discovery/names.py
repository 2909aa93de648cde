"""Normalises the product names of GPUs, and finds the model of a product.

NVML and ResourceSlices have names such as ``NVIDIA A100-SXM4-40GB``. GPU feature discovery writes ``-`` for each space.
HAMi up to 2.7 adds ``NVIDIA-`` to every name. Drivers up to 450 leave the vendor out of the name.
"""

import re

from vcuda.requests.folding import VENDOR
from vcuda.requests.resources import CardModels

_BLANKS = re.compile(r"[-\s]+")
_VENDORS = re.compile(rf"^(?:{VENDOR})+", re.IGNORECASE)
_NOT_IN_A_LABEL = re.compile(r"[^-_.A-Za-z0-9]+", re.ASCII)
_MAX_LABEL_LENGTH = 63


def normalise(name: str) -> str:
    """Return a product name such as ``NVIDIA-A100-SXM4-40GB``; empty if only ``NVIDIA-`` would be left."""
    own = _VENDORS.sub("", f"{_BLANKS.sub('-', name).strip('-')}-").strip("-")
    return f"{VENDOR}{own}" if own else ""


def model_of(product: str, named: CardModels) -> str:
    """Return the GPU model of a normalised product.

    If an entry of `gpu_models` in the quota ConfigMap matches the product, the entry determines the model. Otherwise
    the model is the product's name, shortened to a valid label value.
    """
    model = named.model_of(product)
    return model if model in named.rows else _NOT_IN_A_LABEL.sub("-", product)[:_MAX_LABEL_LENGTH].strip("-_.")
