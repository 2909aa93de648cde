"""The form in which product names are compared: in lower case, and with ``-`` for a space."""

import string

# In Unicode, and so in RE2, the last two characters are k and s in another letter case.
_FOLD = str.maketrans(string.ascii_uppercase + " \u212a\u017f", string.ascii_lowercase + "-ks")


def fold(name: str) -> str:
    """Return a product, or a pattern of products, in the form in which products are compared."""
    return name.translate(_FOLD)
