"""Runs `vcuda-webhook` with another version and ledger format, like another release in a rolling update."""

import os
import sys
from unittest import mock

import vcuda
from vcuda.ledger import text

FORMAT = "OTHER_RELEASE_FORMAT"
COMMAND = (sys.executable, "-m", "tests.e2e.other_release", "serve")
"""The command line of the other release. The environment variable `FORMAT` sets the format of its ledgers."""


def main() -> None:
    with (
        mock.patch.object(vcuda, "__version__", "0.2.0"),
        mock.patch.object(text, "FORMAT", int(os.environ.get(FORMAT, text.FORMAT))),
    ):
        from webhook import cli  # noqa: PLC0415  # the import must follow the patch of the version

        cli.main()


if __name__ == "__main__":
    main()
