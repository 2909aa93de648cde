"""Structured logs: one JSON object a line on standard output."""

from __future__ import annotations

import datetime
import logging
import sys

import msgspec
import structlog


def configure(level: str) -> None:
    """Set up structlog for the process; ``level`` is debug, info, warning or error."""
    structlog.configure(
        processors=[_render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )


def _render(_logger: object, method: str, event: structlog.typing.EventDict) -> bytes:
    """Turn an event into a line; one step, because every admission passes through it."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(None, method, event)
    stamp = datetime.datetime.now(datetime.UTC).isoformat()
    return msgspec.json.encode({"timestamp": stamp, "level": method, **event}, enc_hook=repr)
