"""Words the warnings about GPU models that no node has."""

import difflib
import functools
from collections.abc import Collection

from vcuda.placement.nodes import matches_model
from vcuda.quota.values import listed

MAX_NAMES = 8
"""Maximum number of names in one message."""


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
    """Return "did you mean …?" with the most similar model in ``known``. If none is similar, list ``known`` instead."""
    alike = difflib.get_close_matches(model, known, n=1) or [each for each in known if matches_model(each, model)]
    return f"did you mean {alike[0]}?" if alike else f"nodes have {listed(known, MAX_NAMES)}"
