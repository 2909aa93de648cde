"""Folds the product names of GPUs for comparison: ``NVIDIA A100`` and ``nvidia-a100`` become the same text."""

import string

# `\u212a` is the Kelvin sign, and `\u017f` is the long s. Unicode, and so the regex library RE2, folds them to k and s.
_FOLD = str.maketrans(string.ascii_uppercase + " \u212a\u017f", string.ascii_lowercase + "-ks")


def fold(name: str) -> str:
    """Return a product name, or a pattern of product names, in lower case and with ``-`` for each space."""
    return name.translate(_FOLD)
