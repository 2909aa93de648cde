"""Shell completion of ``kubectl gpuquota``. kubectl runs ``kubectl_complete-gpuquota`` with the words typed so far.

The output must be that of a cobra command. Each line has a suggestion, a tab and the suggestion's help. The last line
is a directive: a number that tells the shell whether to suggest file names.
"""

import sys

import click
from click.shell_completion import ShellComplete

from controller.plugin import cli

NO_FILES, FILES = ":4", ":0"
"""The directives that forbid and allow file names: cobra's ShellCompDirectiveNoFileComp, ShellCompDirectiveDefault."""


def main() -> None:
    """Print the suggestions for the last word of the command line."""
    *words, incomplete = sys.argv[1:] or [""]
    found = ShellComplete(cli.main, {}, "kubectl-gpuquota", "").get_completions(words, incomplete)
    plain = [each for each in found if each.type == "plain"]
    for each in plain:
        click.echo(f"{each.value}\t{each.help}" if each.help else each.value)
    click.echo(NO_FILES if len(plain) == len(found) else FILES)


if __name__ == "__main__":
    main()
