"""The allocation that schedulers and device plugins have written on a pod."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from vcuda.objects import Pod
from vcuda.schemes import SCHEMES, Scheme, is_named


def _split(names: Iterable[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that are whole keys, and those that are the beginning of keys."""
    every = frozenset(names)
    prefixes = tuple(name for name in every if name.endswith("-"))
    return every.difference(prefixes), prefixes


_ANNOTATIONS, _PREFIXES = _split(name for scheme in SCHEMES for name in scheme.allocation_annotations)
_LABELS, _ = _split(name for scheme in SCHEMES for name in scheme.allocation_labels)


class Keys(msgspec.Struct, frozen=True, gc=False):
    """The annotations and labels of one scheme's allocation."""

    annotations: tuple[str, ...]
    labels: tuple[str, ...]


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """The allocation annotations and labels on a pod, of every scheme, and whose they are.

    ``schemes``: those that the pod asks by come first. Two vendors share names (``nvidia.com/predicate-node``): a key
    belongs to the first of the schemes that has it.
    """

    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    schemes: tuple[Scheme, ...]

    def get(self, key: str | None) -> str | None:
        """Return the value of an annotation or label; None where it is absent or empty."""
        if key is None:
            return None
        return self.annotations.get(key) or self.labels.get(key) or None

    def keys_of(self, scheme: Scheme) -> Keys:
        """Return what belongs to a scheme; nothing where it is none of ``schemes``."""
        return dict(_claims(self.annotations, self.labels, self.schemes)).get(scheme.name, Keys((), ()))


def read_allocation(pod: Pod, asked: tuple[Scheme, ...]) -> Allocation | None:
    """Return the allocation on a pod that asks by these schemes; None where there is none.

    A pod may carry what no scheme that it asks by has written: its manifest was copied from another.
    """
    annotations = {sys.intern(key): value for key, value in pod.annotations.items() if _is_allocation(key)}
    labels = {sys.intern(key): value for key, value in pod.labels.items() if key in _LABELS}
    if not annotations and not labels:
        return None
    order = dict.fromkeys((*asked, *SCHEMES))
    found = {name for name, _ in _claims(annotations, labels, order)}
    return Allocation(annotations, labels, tuple(scheme for scheme in order if scheme.name in found))


def _is_allocation(key: str) -> bool:
    return key in _ANNOTATIONS or key.startswith(_PREFIXES)


def _claims(annotations: Iterable[str], labels: Iterable[str], schemes: Iterable[Scheme]) -> Iterator[tuple[str, Keys]]:
    """Give each key to the first scheme that has it; yield the name of each that got some, with what it got."""
    left, left_labels = tuple(annotations), tuple(labels)
    for scheme in schemes:
        keys = Keys(
            tuple(key for key in left if is_named(key, scheme.allocation_annotations)),
            tuple(key for key in left_labels if is_named(key, scheme.allocation_labels)),
        )
        if keys.annotations or keys.labels:
            yield scheme.name, keys
        left = tuple(key for key in left if key not in keys.annotations)
        left_labels = tuple(key for key in left_labels if key not in keys.labels)
