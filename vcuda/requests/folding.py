"""The form in which names of products are compared."""

import string

# Unicode, and so RE2, takes the last two for k and s in another letter case.
_FOLD = str.maketrans(string.ascii_uppercase + " \u212a\u017f", string.ascii_lowercase + "-ks")


def fold(name: str) -> str:
    """Return a product, or a pattern of products, in the form in which they are compared."""
    return name.translate(_FOLD)
