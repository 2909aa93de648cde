"""Warnings that come with an answer: the HTTP header ``Warning``, as kubectl prints it.

Source: RFC 7234 section 5.5, ``warn-code SP warn-agent SP "warn-text"``, several of them apart by commas; Kubernetes
sends each in a header of its own, with code 299 and agent ``-`` (KEP-1693), its text in UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


def warnings_in(headers: Iterable[str]) -> tuple[str, ...]:
    """Return the texts in the values of ``Warning`` headers; what is no warning by the RFC is passed over."""
    return tuple(_text(quoted) for header in headers for quoted in _WARNING.findall(header))


def _text(quoted: str) -> str:
    """Return a quoted-string's text. http.client decodes headers as Latin-1, whatever they are."""
    return _ESCAPED.sub(r"\1", quoted).encode("latin-1").decode("utf-8", "replace")
