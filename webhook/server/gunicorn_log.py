"""gunicorn's own log lines, written like all others: one JSON object a line on standard output."""

import logging

import structlog
from gunicorn.config import Config
from gunicorn.glogging import Logger


class StructuredLogger(Logger):
    """gunicorn's logger, whose lines structlog writes."""

    def setup(self, cfg: Config) -> None:
        """Replace the handlers that would write text to standard error."""
        self.error_log.setLevel(cfg.loglevel.upper())
        self.error_log.handlers = [_ToStructlog()]
        self.access_log.handlers = []


class _ToStructlog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        log.log(record.levelno, "gunicorn", message=record.getMessage(), exc_info=record.exc_info or False)
