"""The program `xce-testbed`: the reference cluster's processes and an operator's verbs for it."""

from __future__ import annotations

import click

from xce_supervisor import __version__
from xce_supervisor.cli.entry import enter


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="xce-testbed")
def program() -> None:
    """A small but real cluster: controllers, schedulers, workers, and verbs to work with them."""


def main() -> None:
    """Entry of the console script."""
    enter(program, "xce-testbed")


if __name__ == "__main__":
    main()
