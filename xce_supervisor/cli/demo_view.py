"""How the demo is shown: live on a terminal, line by line elsewhere, and as a report at the end."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import uvloop

from xce_supervisor.cli import paper
from xce_supervisor.cli.paper import BAD, DOUBT, GOOD, PLAIN, QUIET, STRONG, Cell, Line, Table
from xce_supervisor.cli.words import span

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xce_supervisor.testbed.demo import Options, Scene
    from xce_supervisor.testbed.demo_report import Report

# Often enough to look alive, seldom enough to leave the machine to the cluster.
REDRAW_S = 0.1
STORY_LINES = 16


def play(options: Options, *, as_json: bool) -> Report:
    """Run the demo and show it while it runs: on standard error if standard output is for JSON.

    Raises:
        ConfigError: an option cannot be used. KeyboardInterrupt: after everything was ended.
    """
    with _shown(sys.stderr if as_json else sys.stdout, quiet=as_json and not sys.stderr.isatty()) as tell:
        return _perform(options, tell)


def _perform(options: Options, tell: Callable[[Scene], None]) -> Report:
    from xce_supervisor.testbed.demo import perform

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_told(perform(options, tell)))


async def _until_told(story: Coroutine[Any, Any, Report]) -> Report:
    """Run the story; SIGTERM and SIGHUP end it as Ctrl-C does, with everything cleaned up."""
    task = asyncio.ensure_future(story)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def report(seen: Report) -> list[Line]:
    """Return the lines of the report at the end."""
    jobs, promote = seen.jobs, seen.promote_to_scheduler_joined_ms
    lines: list[Line] = [()]
    rows = tuple(
        (
            (fault.kind, STRONG),
            (f"{fault.at_s:.1f} s", PLAIN),
            (_ms(fault.recovered_ms), GOOD if fault.recovered_ms is not None else BAD),
            (fault.detail, PLAIN),
        )
        for fault in seen.faults
    )
    lines.append(Table(heads=("FAULT", "AT", "WHOLE AFTER", ""), rows=rows))
    lines.append(())
    facts: tuple[tuple[str, str, bool], ...] = (
        ("schedulers alive per term, at most", str(seen.max_schedulers_alive_per_term), seen.max_schedulers_alive_per_term <= 1),
        ("schedulers alive at the end", str(seen.schedulers_alive_at_end), seen.schedulers_alive_at_end == 1),
        ("jobs submitted, finished", f"{jobs.submitted}, {jobs.finished}", jobs.submitted == jobs.finished),
        ("jobs lost, run twice", f"{jobs.lost}, {jobs.run_twice}", not (jobs.lost or jobs.run_twice)),
        ("promotion to scheduler joined", f"median {_ms(promote.p50)}, longest {_ms(promote.max)}", True),
        ("wedge found to rejoined", _ms(seen.wedge_detect_to_rejoined_ms), True),
        ("processes left behind", str(seen.orphan_processes_at_end), seen.orphan_processes_at_end == 0),
    )
    lines += [((f"{name:<36}", QUIET), (value, PLAIN if right else BAD)) for name, value, right in facts]
    lines.append(())
    lines += [(("VIOLATED  ", BAD), (text, PLAIN)) for text in seen.violations]
    verdict: Cell = ("every invariant held", GOOD) if seen.ok else (f"{len(seen.violations)} invariants were violated", BAD)
    about = f"  ({seen.controllers} controllers on {seen.engine}, seed {seen.seed}, {span(seen.took_s)})"
    lines.append((verdict, (about, QUIET)))
    if seen.folder:
        lines.append((("logs and journals: ", QUIET), (seen.folder, PLAIN)))
    return lines


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


@contextmanager
def _shown(stream: TextIO, *, quiet: bool) -> Iterator[Callable[[Scene], None]]:
    """Give a function that shows the scene on `stream`."""
    if quiet:
        yield lambda scene: None
    elif stream.isatty():
        with _live(stream) as tell:
            yield tell
    else:
        yield _Story(stream).tell


class _Story:
    """Prints each line of the story once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = 0

    def tell(self, scene: Scene) -> None:
        for at_s, text in scene.said[self._told :]:
            print(f"{at_s:6.1f} s  {text}", file=self._stream, flush=True)
        self._told = len(scene.said)


@contextmanager
def _live(stream: TextIO) -> Iterator[Callable[[Scene], None]]:
    """Draw the cluster over and over; the story stays on screen at the end."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    drawn_at = 0.0
    last: Scene | None = None
    with Live(console=console, auto_refresh=False, transient=False) as live:

        def tell(scene: Scene) -> None:
            nonlocal drawn_at, last
            last = scene
            if time.monotonic() - drawn_at >= REDRAW_S:
                drawn_at = time.monotonic()
                live.update(_picture(scene), refresh=True)

        try:
            yield tell
        finally:
            if last is not None:
                live.update(_picture(last), refresh=True)  # what came after the last drawing stays on screen too


def _picture(scene: Scene) -> RenderableType:
    from rich.console import Group

    now_s = time.monotonic() - scene.began_s
    lines: list[Line] = [
        (
            ("xce-supervisor demo", STRONG),
            (f"   {now_s:5.1f} s   ", QUIET),
            (scene.acting, DOUBT if scene.acting != "calm" else GOOD),
        ),
        (),
        _hosts(scene),
        (),
        _jobs(scene),
        (),
        *(((f"{at_s:6.1f} s  ", QUIET), (text, PLAIN)) for at_s, text in scene.said[-STORY_LINES:]),
    ]
    return Group(*(paper.drawn(line) for line in lines))


def _hosts(scene: Scene) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for host in scene.sight.stage.hosts:
        status = scene.sight.statuses.get(host.name)
        alive = [f"pid {seen.pid} (term {seen.term})" for seen in scene.sight.schedulers if seen.host == host.name]
        session = status.scheduler if status is not None else None
        rows.append(
            (
                (host.name, STRONG),
                (status.role if status else "no answer", _role_style(status.role if status else "")),
                (str(status.term) if status else "-", PLAIN),
                (", ".join(alive) or "-", PLAIN if len(alive) <= 1 else BAD),
                ("joined" if session and session.joined else "-", GOOD if session and session.joined else PLAIN),
                (_unacted(session.oldest_unacked_ms if session else None), DOUBT),
            )
        )
    return Table(heads=("HOST", "CONTROLLER", "TERM", "SCHEDULER", "SESSION", "OLDEST PUSH NOT ACTED ON"), rows=tuple(rows))


def _role_style(role: str) -> str:
    return {"primary": GOOD, "": BAD}.get(role, PLAIN)


def _unacted(age_ms: int | None) -> str:
    return "-" if age_ms is None or age_ms < 100 else span(age_ms / 1000)


def _jobs(scene: Scene) -> Line:
    primary = scene.sight.primary()
    status = scene.sight.statuses.get(primary.name) if primary else None
    counts = f"{status.jobs_pending} pending, {status.jobs_running} running, {status.jobs_finished} finished" if status else "-"
    return (("jobs  ", QUIET), (f"{scene.submitted} submitted; {counts}", PLAIN))
