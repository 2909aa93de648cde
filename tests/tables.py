"""Writes the cases of a table-driven test as keyword arguments."""

from typing import Any

import pytest


def cases(names: str, /, **rows: Any) -> pytest.MarkDecorator:
    """Run a test once for each keyword argument in ``rows``. The argument's name is the id of the run.

    ``names``: the test's parameters. Each argument is a tuple of their values, or the value of a single parameter.
    """
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))
