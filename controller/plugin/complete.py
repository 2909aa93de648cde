"""Shell completion of ``kubectl gpuquota``. kubectl runs ``kubectl_complete-gpuquota`` with the words typed so far.

The output must have the format of cobra, the Go library with which kubectl is built. Each line has a suggestion, a tab
and the suggestion's help. The last line is a number that tells the shell whether to suggest file names.
"""

import sys

import click
from click.shell_completion import ShellComplete

from controller.plugin import cli

NO_FILES, FILES = ":4", ":0"
"""`NO_FILES` tells the shell not to suggest file names, `FILES` to suggest them (cobra's NoFileComp and Default)."""


def main() -> None:
    *words, incomplete = sys.argv[1:] or [""]
    found = ShellComplete(cli.main, {}, "kubectl-gpuquota", "").get_completions(words, incomplete)
    plain = [each for each in found if each.type == "plain"]
    for each in plain:
        click.echo(f"{each.value}\t{each.help}" if each.help else each.value)
    click.echo(NO_FILES if len(plain) == len(found) else FILES)


if __name__ == "__main__":
    main()
