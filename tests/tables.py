"""Writes the cases of a table-driven test as keyword arguments."""

from typing import Any

import pytest


def cases(names: str, /, **rows: Any) -> pytest.MarkDecorator:
    """Run a test once for each keyword argument in ``rows``, whose name becomes the id of that run. The argument is a
    tuple of values for the test's parameters in ``names``, or the value itself if there is one parameter.
    """
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))
