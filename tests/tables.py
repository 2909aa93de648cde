"""Tables of cases."""

from typing import Any

import pytest


def cases(names: str, /, **rows: Any) -> pytest.MarkDecorator:
    """Run a test once for each row. A row is a tuple of the values of ``names``, or the value itself for a
    single name.
    """
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))
