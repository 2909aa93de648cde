"""Normalises the product names of GPUs, and finds the model of a product.

NVML and ResourceSlices have names such as ``NVIDIA A100-SXM4-40GB``. GPU feature discovery writes ``-`` for each space.
HAMi up to 2.7 adds ``NVIDIA-`` to every name. Drivers up to 450 leave the vendor out of the name.
"""

import difflib
import functools
import re
from collections.abc import Collection

from vcuda.placement.nodes import matches_model
from vcuda.quota.values import listed
from vcuda.requests.folding import VENDOR
from vcuda.requests.resources import CardModels

_BLANKS = re.compile(r"[-\s]+")
_VENDORS = re.compile(rf"^(?:{VENDOR})+", re.IGNORECASE)
_NOT_IN_A_LABEL = re.compile(r"[^-_.A-Za-z0-9]+", re.ASCII)
_MAX_LABEL_LENGTH = 63

MAX_NAMES = 8
"""Maximum number of names in one message."""


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


def model_warnings(models: Collection[str], known: Collection[str]) -> tuple[str, ...]:
    """Return warnings about models in a quota that no node has. ``known``: the models of the nodes."""
    if models and not known:
        return ("no node has a GPU model, so pods that request GPUs stay pending",)
    missing = sorted(set(models).difference(known))
    there = tuple(sorted(known))
    warnings = [f"no node has GPU model {model}; {nearest(model, there)}" for model in missing[:MAX_NAMES]]
    more = [f"and {len(missing) - MAX_NAMES} more models that no node has"] if len(missing) > MAX_NAMES else []
    return (*warnings, *more)


# The most similar model name is cached, because every report on a namespace computes the same warnings.
@functools.lru_cache(maxsize=256)
def nearest(model: str, known: tuple[str, ...]) -> str:
    """Return the question whether the most similar of the ``known`` models is meant, or else these models."""
    alike = difflib.get_close_matches(model, known, n=1) or [each for each in known if matches_model(each, model)]
    return f"did you mean {alike[0]}?" if alike else f"nodes have {listed(known, MAX_NAMES)}"
