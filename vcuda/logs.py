"""Structured logs: one JSON object a line on standard output."""

from __future__ import annotations

import logging
import sys

import msgspec
import structlog


def configure(level: str) -> None:
    """Set up structlog for the process; ``level`` is debug, info, warning or error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )


def _render(_logger: object, _method: str, event: structlog.typing.EventDict) -> bytes:
    return msgspec.json.encode(event, enc_hook=repr)
