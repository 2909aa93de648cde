"""The entry points of the programs that need the packages of the pip extra `server`."""

import importlib
from typing import Any

from vcuda import cli

EXTRA = "vcuda-quota[server]"

_OURS = frozenset({"vcuda", "webhook", "controller", "certs"})


def load(module: str, program: str) -> Any:
    """Import a module of this project. If a package is missing, exit with a message that names the pip extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        cli.fail(f"{program} needs the package {error.name}. Install {EXTRA}", cli.FAILED)


def webhook() -> None:
    load("webhook.cli", "vcuda-webhook").main()


def controller() -> None:
    load("controller.cli", "vcuda-controller").main()


def certs() -> None:
    load("certs.cli", "vcuda-certs").main()
