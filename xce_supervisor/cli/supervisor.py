"""The program `xce-supervisor`: its verbs. Decides nothing; docs/operating.md lists verbs, files and exit codes."""

from __future__ import annotations

import click

from xce_supervisor import __version__
from xce_supervisor.cli.entry import enter


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="xce-supervisor")
def program() -> None:
    """Runs a batch cluster's scheduler exactly where its primary controller is."""


def main() -> None:
    """Entry of the console script."""
    enter(program, "xce-supervisor")


if __name__ == "__main__":
    main()
