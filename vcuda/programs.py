"""Starts the programs that need the packages of the pip extra `server`. If a package is missing, prints a message."""

import importlib
from typing import Any

from vcuda import cli

EXTRA = "vcuda-quota[server]"

_OURS = frozenset({"vcuda", "webhook", "controller", "certs"})


def load(module: str, program: str) -> Any:
    """Import a module of this project. If a package is missing, exit with a message that names the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        cli.fail(f"{program} needs more packages, such as {error.name}; install {EXTRA}", cli.FAILED)


def webhook() -> None:
    """Run ``vcuda-webhook``."""
    load("webhook.cli", "vcuda-webhook").main()


def controller() -> None:
    """Run ``vcuda-controller``."""
    load("controller.cli", "vcuda-controller").main()


def certs() -> None:
    """Run ``vcuda-certs``."""
    load("certs.cli", "vcuda-certs").main()
