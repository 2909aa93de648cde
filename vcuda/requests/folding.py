"""Folds the product names of GPUs for comparison: ``NVIDIA A100`` and ``a100`` become the same text.

A product has several spellings. Drivers up to 450 leave the vendor out of the name, HAMi up to 2.7 adds it once more,
GPU feature discovery writes ``-`` for a space, and clouds write small letters.
"""

import re
import string

VENDOR = "NVIDIA-"

# `\u212a` is the Kelvin sign, and `\u017f` is the long s. Unicode, and so the regex library RE2, folds them to k and s.
_FOLD = str.maketrans(string.ascii_uppercase + " \u212a\u017f", string.ascii_lowercase + "-ks")
# In a pattern of product names, a wildcard may stand for the blank after the vendor's name. A `*` may stand for more
# text too, so it is kept.
_VENDORS = re.compile(rf"(?:{VENDOR[:-1]}(?:[-?]|(?=\*)))+", re.IGNORECASE)


def fold(name: str) -> str:
    """Return a product name, or a pattern of product names, in lower case, with ``-`` for each space, and without the
    vendor's name at its beginning."""
    folded = name.translate(_FOLD)
    vendors = _VENDORS.match(folded)
    return folded[vendors.end() :] if vendors else folded


def spellings(product: str) -> tuple[str, str]:
    """Return a product name as label values: with the vendor's name at its beginning, and without."""
    own = product.replace(" ", "-")
    own = own[len(own) - len(fold(own)) :]
    return f"{VENDOR}{own}", own
