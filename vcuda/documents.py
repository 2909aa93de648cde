"""Loads YAML documents as kubectl does, with a bound on their aliases."""

import contextlib
import itertools
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from yaml import CSafeLoader as SafeLoader
else:
    # If pip builds PyYAML on a machine without libyaml, PyYAML has no CSafeLoader.
    SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_REPEATED = 4 * 2**20
"""The maximum number of characters that the aliases of one document repeat. A few lines could repeat 10^10. Each value
counts `VALUE_CHARACTERS` more, because it takes time and memory even if it is short."""

VALUE_CHARACTERS = 20

NOT_YAML = (yaml.YAMLError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""The exceptions of `load_all`. PyYAML also raises ValueError (impossible date), LookupError, ArithmeticError and
AttributeError (wrong value for a tag), and RecursionError (endless nesting)."""


class _Loader(SafeLoader):
    """PyYAML's loader, but numbers with colons stay text: kubectl reads 1:30 as text, and PyYAML reads it as 90.

    PyYAML needs 20 s for a number of 600 KB with colons.
    """


def _without_colons(construct: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def constructed(loader: _Loader, node: Any) -> Any:
        text = loader.construct_scalar(node)
        return text if ":" in text else construct(loader, node)

    return constructed


_Loader.add_constructor("tag:yaml.org,2002:int", _without_colons(SafeLoader.construct_yaml_int))
_Loader.add_constructor("tag:yaml.org,2002:float", _without_colons(SafeLoader.construct_yaml_float))


def load_all(text: str) -> list[Any]:
    """Return the documents in a text. Raises one of ``NOT_YAML``, also if aliases repeat too much."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):  # libyaml does not read the surrogate pairs of JSON
            return [json.loads(text)]
    loader = _Loader(text)
    documents = []
    try:
        while loader.check_node():
            root: Any = loader.get_node()
            sizes: dict[yaml.Node, float] = {}
            if _size(root, sizes) - sum(map(_own_size, sizes)) > MAX_REPEATED:
                raise ValueError(f"the aliases of a document must not repeat more than {MAX_REPEATED} characters")
            documents.append(loader.construct_document(root))
    finally:
        loader.dispose()
    return documents


def _size(node: yaml.Node, sizes: dict[yaml.Node, float]) -> float:
    """Return the size of a node if each alias is replaced by its value; infinite if the node contains itself."""
    if node not in sizes:
        sizes[node] = math.inf
        pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
        children = itertools.chain.from_iterable(pairs) if isinstance(node, yaml.CollectionNode) else ()
        sizes[node] = _own_size(node) + sum([_size(child, sizes) for child in children])
    return sizes[node]


def _own_size(node: yaml.Node) -> int:
    return VALUE_CHARACTERS + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
