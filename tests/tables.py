"""Tables of cases."""

from typing import Any

import pytest


def cases(names: str, /, **rows: Any) -> pytest.MarkDecorator:
    """Run a test once for each row: a tuple of the values of ``names``, or the value itself where there is one name."""
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))
