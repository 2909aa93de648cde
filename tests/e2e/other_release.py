"""Runs `vcuda-webhook` with another version and ledger format, as another release during a rolling update."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import vcuda
from tests.processes import WebhookProcess
from vcuda.ledger import text

FORMAT = "OTHER_RELEASE_FORMAT"
COMMAND = (sys.executable, "-m", "tests.e2e.other_release")


def of_release(flags: Sequence[str | Path], ca: Path, ledger_format: int = text.FORMAT) -> WebhookProcess:
    return WebhookProcess(flags, ca, {FORMAT: str(ledger_format)}, (*COMMAND, "serve"))


def main() -> None:
    with (
        mock.patch.object(vcuda, "__version__", "0.2.0"),
        mock.patch.object(text, "FORMAT", int(os.environ.get(FORMAT, text.FORMAT))),
    ):
        from webhook import cli  # noqa: PLC0415  # the import must follow the patch of the version

        cli.main()


if __name__ == "__main__":
    main()
