"""The program `xce-supervisor`: its verbs. Decides nothing; docs/operating.md lists verbs, files and exit codes.

What a verb needs is imported when it runs: `run` must stay small, and `status` quick.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from xce_supervisor import __version__
from xce_supervisor.cli.asking import VARIABLE, config_file, failed, places_of, tell, who
from xce_supervisor.cli.entry import ExitCode, enter
from xce_supervisor.cli.slim import load_structlog_alone
from xce_supervisor.cli.words import clean

F = TypeVar("F", bound=Callable[..., Any])


def _config_option(verb: F) -> F:
    text = "The supervisor's TOML file. Default: the only one in /etc/xce-supervisor."
    return click.option("-c", "--config", "config", metavar="FILE", envvar=VARIABLE, help=text)(verb)


def _json_option(verb: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(verb)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="xce-supervisor")
def program() -> None:
    """Runs a batch cluster's scheduler exactly where its primary controller is.

    Exit codes: 0 as wanted, 1 degraded, 3 not running, 4 cannot tell, 5 refused, 75 another one runs, 78 bad arguments or
    configuration.
    """


@program.command()
@_config_option
def run(config: str | None) -> int:
    """Watch the controller and run its units. What systemd starts.

    SIGHUP reads the configuration again, SIGTERM ends it; children whose units say so go on, for the next one to adopt.
    """
    from xce_supervisor.config import load

    # A hang-up that comes before the program has its own handler asks for what is about to be done anyway; it must not kill.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    loaded = load(config_file(config))
    load_structlog_alone()
    from xce_supervisor.supervisor.program import run as run_supervisor

    return run_supervisor(loaded)


@program.command()
@_config_option
@_json_option
def status(config: str | None, as_json: bool) -> int:
    """Say what runs, what should run, since when, and why not.

    Answers within two seconds, always: a supervisor that does not answer is reported as such, with its last status and its age.
    """
    from xce_supervisor.cli import asking, draw, paper

    places = places_of(config)
    said = asking.status(places)
    if as_json:
        known: dict[str, Any] = msgspec.to_builtins(said.view) if said.view else {}
        age_s = round(time.time() - said.view.wall, 3) if said.view else None
        paper.put_json({"responding": not said.trouble, "trouble": said.trouble, "age_s": age_s, **known})
    else:
        paper.put(draw.status(said, places))
    return said.code


@program.command()
@click.argument("unit", required=False)
@_config_option
@_json_option
def why(unit: str | None, config: str | None, as_json: bool) -> int:
    """List every gate of UNIT (default: of all units): why it runs, or why it does not."""
    from xce_supervisor.cli import asking, draw, paper

    places = places_of(config)
    said = asking.status(places)
    if said.trouble:
        click.echo(f"xce-supervisor: {clean(said.trouble)}", err=True)
    if said.view is None:
        return said.code
    units = [one for one in said.view.units if unit in (None, one.name)]
    if unit is not None and not units:
        raise _unknown_unit(unit, [one.name for one in said.view.units])
    if as_json:
        paper.put_json({"responding": not said.trouble, "role": said.view.role, "units": units})
    else:
        paper.put(draw.why(said.view, units))
    if said.trouble:
        return said.code
    return ExitCode.OK if all(one.as_wanted for one in units) else ExitCode.DEGRADED


@program.command()
@_config_option
@click.option("--unit", metavar="UNIT", help="Only events of this unit.")
@click.option("--since", metavar="WHEN", help='Only events since then: "10m", "2h", "3d", or "2026-11-30 03:00".')
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), metavar="N", help="Only the last N events (default 100; all with --since)."
)
@click.option("-f", "--follow", is_flag=True, help="Go on printing what happens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def events(config: str | None, unit: str | None, since: str | None, lines: int | None, follow: bool, as_json: bool) -> int:
    """Print what happened, from the journal; also while no supervisor runs."""
    from xce_supervisor.cli import history

    return history.show(places_of(config), unit=unit, since=since, lines=lines, follow=follow, as_json=as_json)


@program.command()
@_config_option
@_json_option
def check(config: str | None, as_json: bool) -> int:
    """Validate the configuration and the world it speaks of, and say what would be done. Changes nothing.

    Exit code 0: nothing stands in the way; 1: something does; 78: the configuration itself cannot be used.
    """
    import os

    from xce_supervisor.cli import draw, paper
    from xce_supervisor.config import load
    from xce_supervisor.supervisor import survey

    loaded = load(config_file(config))
    findings = survey.check(loaded, dict(os.environ))
    plans = survey.plan(loaded)
    errors = [finding for finding in findings if finding.level == "error"]
    if as_json:
        paper.put_json({"ok": not errors, "config": str(loaded.file), "findings": findings, "units": plans})
    else:
        paper.put(draw.check(loaded.file, findings, plans))
    return ExitCode.DEGRADED if errors else ExitCode.OK


@program.command()
@click.argument("unit")
@click.option("--why", "why_", required=True, metavar="TEXT", help="Shown in status until it is resumed.")
@_config_option
@_json_option
def pause(unit: str, why_: str, config: str | None, as_json: bool) -> int:
    """Neither start nor restart UNIT until `resume`, also over restarts of the supervisor. Demotion still stops it."""
    if not why_.strip():
        raise click.UsageError("--why must say something")
    if len(why_) > 300:
        raise click.UsageError("--why may have 300 characters")
    return _change(config, "pause", {"unit": unit, "by": who(), "why": why_.strip()}, as_json, f"{unit} is paused")


@program.command()
@click.argument("unit")
@_config_option
@_json_option
def resume(unit: str, config: str | None, as_json: bool) -> int:
    """End a pause of UNIT."""
    return _change(config, "resume", {"unit": unit, "by": who()}, as_json, f"{unit} is resumed")


@program.command()
@click.argument("unit")
@_config_option
@_json_option
def restart(unit: str, config: str | None, as_json: bool) -> int:
    """Stop UNIT by its ladder and start it again, if it is wanted."""
    return _change(config, "restart", {"unit": unit, "by": who()}, as_json, f"{unit} is being restarted")


@program.command()
@click.option("--engine", type=click.Choice(["sqlite", "etcd"]), default="sqlite", show_default=True, help="Consensus store.")
@click.option(
    "--controllers", type=click.IntRange(2, 9), default=3, show_default=True, help="Controllers, each with a supervisor."
)
@click.option("--jobs", type=click.IntRange(1, 5000), default=60, show_default=True, help="Jobs submitted over the demo.")
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=1, show_default=True, help="How often all faults are gone through."
)
@click.option("--seed", type=int, default=None, help="Repeat a demo's choices. Default: another one each time.")
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), default=None, help="Keep logs and journals in this folder."
)
@_json_option
def demo(engine: str, controllers: int, jobs: int, rounds: int, seed: int | None, keep: Path | None, as_json: bool) -> int:
    """Show a whole cluster on this machine going through kills, hangs and fail-overs, and judge what happened.

    Exit code 0 only if every invariant held. No root, no services; cleans up after itself, also on Ctrl-C.
    """
    from xce_supervisor.cli import demo_view, paper
    from xce_supervisor.testbed.demo import Options

    options = Options(engine=engine, controllers=controllers, jobs=jobs, rounds=rounds, seed=seed, keep=keep)
    seen = demo_view.play(options, as_json=as_json)
    if as_json:
        paper.put_json(seen)
    else:
        paper.put(demo_view.report(seen))
    return ExitCode.OK if seen.ok else ExitCode.DEGRADED


def _change(config: str | None, verb: str, args: dict[str, Any], as_json: bool, done: str) -> int:
    from xce_supervisor.cli import paper

    answer = tell(places_of(config), verb, args)
    if as_json:
        paper.put_json({"ok": True, "verb": verb, **args, "result": answer})
    else:
        click.echo(done)
    return ExitCode.OK


def _unknown_unit(name: str, known: list[str]) -> click.exceptions.Exit:
    from xce_supervisor.config.problem import suggest

    return failed(ExitCode.REFUSED, f"no unit is called {clean(name)}{suggest(name, known)}")


def main() -> None:
    """Entry of the console script."""
    enter(program, "xce-supervisor")


if __name__ == "__main__":
    main()
