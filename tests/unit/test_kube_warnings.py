"""Warning headers: what the API server and its webhooks want people to read."""

from __future__ import annotations

import pytest

from vcuda.kube.client import warnings_in


@pytest.mark.parametrize(
    ("headers", "texts"),
    [
        pytest.param([], (), id="none"),
        pytest.param(['299 - "nearly used up"'], ("nearly used up",), id="as Kubernetes sends it"),
        pytest.param(['299 - "one"', '299 - "two"'], ("one", "two"), id="one header each"),
        pytest.param(['299 - "one, and more", 299 - "two"'], ("one, and more", "two"), id="one header for all"),
        pytest.param([r'299 - "a \"quoted\" word, C:\\x"'], ('a "quoted" word, C:\\x',), id="escapes"),
        pytest.param(['299 - "für M40"'.encode().decode("latin-1")], ("für M40",), id="UTF-8, decoded as Latin-1"),
        pytest.param(['110 proxy:80 "stale" "Sat, 25 Aug 2012 23:34:45 GMT"'], ("stale",), id="agent and date"),
        pytest.param(["", "299", '299 - "cut', "nothing of the kind"], (), id="malformed"),
    ],
)
def test_warnings(headers: list[str], texts: tuple[str, ...]) -> None:
    assert warnings_in(headers) == texts
