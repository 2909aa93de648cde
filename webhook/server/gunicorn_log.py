"""Writes the log lines of gunicorn as JSON objects, like all other log lines of the webhook."""

import logging

import structlog
from gunicorn.config import Config
from gunicorn.glogging import Logger


class StructuredLogger(Logger):
    """A logger for gunicorn that passes each line to structlog."""

    def setup(self, cfg: Config) -> None:
        """Replace gunicorn's handlers, which would write plain text to standard error."""
        self.error_log.setLevel(cfg.loglevel.upper())
        self.error_log.handlers = [_ToStructlog()]
        self.access_log.handlers = []


class _ToStructlog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        log.log(record.levelno, "gunicorn", message=record.getMessage(), exc_info=record.exc_info or False)
