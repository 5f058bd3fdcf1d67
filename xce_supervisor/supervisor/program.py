"""The program beside a controller: builds every part, once, by constructor arguments; runs until it is told to end.

Order matters at the start: the lock before anything is touched (docs/rules.md S16), SIGCHLD blocked before any thread exists,
survivors adopted before the controller is asked (S17), the control socket last.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
import zlib
from typing import Any

import structlog
import uvloop
from msgspec import structs, to_builtins

from xce_supervisor import __version__
from xce_supervisor.config.difference import diff
from xce_supervisor.config.load import load, places
from xce_supervisor.config.policies import role_policy, unit_policy
from xce_supervisor.config.settings import Config
from xce_supervisor.core import role as role_part
from xce_supervisor.core import supervision as sup
from xce_supervisor.core.child_words import Pause, PollRole, Record
from xce_supervisor.core.words import NS_PER_MS, Binding
from xce_supervisor.errors import ConfigError
from xce_supervisor.link.tls import TlsFiles, TlsSource
from xce_supervisor.process.births import Births
from xce_supervisor.process.exits import Exited, Exits
from xce_supervisor.process.identity import boot_id
from xce_supervisor.process.lanes import Lanes
from xce_supervisor.process.notify import sd_notify
from xce_supervisor.process.single import AlreadyRunning, acquire, claim
from xce_supervisor.process.spawn import seal_descriptors
from xce_supervisor.process.tree import open_forest
from xce_supervisor.supervisor import adoption, clock, logs, report, view
from xce_supervisor.supervisor.children import Children
from xce_supervisor.supervisor.control import ControlServer
from xce_supervisor.supervisor.driver import Driver
from xce_supervisor.supervisor.journal import Journal
from xce_supervisor.supervisor.keeper import Keeper, kept
from xce_supervisor.supervisor.records import Records
from xce_supervisor.supervisor.statefile import Loaded, StateFile, this_host
from xce_supervisor.supervisor.statefile import State as Kept
from xce_supervisor.supervisor.verbs import Verbs
from xce_supervisor.supervisor.watch import RoleWatch

log = structlog.get_logger()

# The exit code of a supervisor that found another one at work (docs/operating.md).
LOCK_LOST = 75
# The exit code after a bug: EX_SOFTWARE.
BUG = 70

_LANES = 4
_LANES_CAP = 512
_CLOSE_S = 2.0
# A lane that is ready to spawn waits this long at most for a loop that is busy, and the loop for a lane; Python's own 5 ms are
# longer than a whole restart takes.
_SWITCH_S = 0.0005


def run(config: Config) -> int:
    """Run a supervisor until SIGTERM or SIGINT. Returns the exit code: 0, or 75 when another one serves this controller. Blocks.

    Raises ConfigError: folders or certificates cannot be used.
    """
    logs.set_up(config.supervisor.log_level, config.supervisor.log_format)
    os.chdir("/")  # whatever directory we were started in may go away (S18)
    os.umask(0o022)
    sys.setswitchinterval(_SWITCH_S)
    seal_descriptors()
    try:
        claimed = claim(config.controller.address)  # first: a rival with folders of its own touches not even those
        _make_folders(config)
        held = acquire(config.supervisor.state_dir / "lock")
    except AlreadyRunning as error:
        log.error("supervisor.refused", reason=str(error), controller=config.controller.id, address=config.controller.address)
        return LOCK_LOST
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(_on_bug)
    claimed.attend(loop)
    try:
        return loop.run_until_complete(Program(loop, config).run())
    except ConfigError:
        raise
    except Exception as error:
        log.critical("supervisor.crashed", exc_info=error)
        return BUG
    finally:
        loop.close()
        held.release()
        claimed.release()


class Program:
    """Every part of one supervisor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: Config) -> None:
        self.config = config
        self._loop = loop
        self._ended = asyncio.Event()
        self._places = places(config)
        self._started = clock.now()
        self._exits = Exits(loop, Births(), _on_orphan)
        self._exits.reap_orphans()  # before any thread: see its text
        supervisor = config.supervisor
        self._journal = Journal(
            self._places.journal, boot_id(), bytes_max=supervisor.journal_bytes_max, files_max=supervisor.journal_files_max
        )
        self._records = Records(loop, self._journal, time.time)
        self._lanes = Lanes(loop, _LANES, _LANES_CAP)
        self._state_file = StateFile(self._places.state_file, this_host(), config.controller.id)
        self._tls = _tls(config)
        self._forest = open_forest(loop, forest_name(config), self._exits.births, config.folders.cgroup_root)
        self._mark = str(supervisor.state_dir)
        self._children = Children(
            loop,
            config,
            self._lanes,
            self._exits,
            self._forest,
            self._mark,
            self._feed_child,
            self._binding_held,
            self._told_by_controller,
            time.time,
        )
        loaded = self._state_file.load()
        found = adoption.survivors(loaded.state.children, self._forest.survivors(self._mark), loaded.state.generations)
        policy = self._policy(config)
        initial = sup.initial(
            clock.now(),
            policy,
            adoption.held_binding(found, config.controller.id),
            {pause.unit: Pause(pause.by, pause.why, pause.since_wall_s) for pause in loaded.state.pauses},
            loaded.state.generations,
            [survivor.unit for survivor in found if survivor.unit not in policy.units],
        )
        self._driver = Driver(loop, initial, policy, self._perform, self._after_burst)
        self._keeper = Keeper(
            loop, self._lanes, self._state_file, self._places.last_status, self._records, self._to_keep, self.status
        )
        self._watch = RoleWatch(
            config.controller.address,
            self._tls,
            config.role.poll_interval_ms,
            config.role.request_deadline_ms,
            self._driver.feed,
            self._driver.expect,
        )
        self._verbs = Verbs(self)
        self._control = ControlServer(self._places.socket, self._verbs.handle)
        self._watchdog_s = _watchdog_s()
        self._watchdog_at = 0.0
        self._ensured_at = 0.0
        self._ensuring: asyncio.Task[None] | None = None
        self._tell(loaded, found)

    # ------------------------------------------------------------------ life

    async def run(self) -> int:
        """Serve until told to end and everything that must end has ended. Returns the exit code."""
        self._take_signals()
        await self._control.start()
        watching = asyncio.ensure_future(self._watch.run())
        watching.add_done_callback(self._on_watch_ended)
        sd_notify(READY=1, STATUS=f"watching {self.config.controller.id} at {self.config.controller.address}")
        log.info("supervisor.started", controller=self.config.controller.id, tree=self._forest.why)
        self._driver.feed(sup.TimePassed())
        await self._ended.wait()
        sd_notify(STOPPING=1)
        watching.remove_done_callback(self._on_watch_ended)
        watching.cancel()
        await asyncio.wait([watching])
        await self._close()
        return 0

    async def _close(self) -> None:
        await self._control.close()
        hung = await self._lanes.close(_CLOSE_S)
        self._driver.close()
        self._records.flush()
        self._keeper.save()
        self._records.take("", Record("supervisor.ended", "", (("hung_lanes", len(hung)),)))
        self._children.close()
        self._exits.close()
        self._forest.close()
        self._journal.close(_CLOSE_S)

    def _on_watch_ended(self, task: asyncio.Task[None]) -> None:
        """The watch never ends by itself: whatever ended it is a bug, and systemd restarts us."""
        error = task.exception() if not task.cancelled() else None
        log.critical("watch.ended", reason=repr(error))
        os._exit(BUG)

    def _take_signals(self) -> None:
        self._loop.add_signal_handler(signal.SIGTERM, self._leave, False)
        self._loop.add_signal_handler(signal.SIGINT, self._leave, True)
        self._loop.add_signal_handler(signal.SIGHUP, self.reload)

    def _leave(self, stop_all: bool) -> None:
        self._driver.feed(sup.LeaveAsked(stop_all))

    # ------------------------------------------------------------------ between the core and the shells

    def _perform(self, effect: sup.Effect) -> None:
        match effect:
            case Record():
                self._records.take("", effect)
            case PollRole():
                self._watch.poll_now()
            case sup.Leave():
                self._ended.set()
            case sup.ForUnit(unit=unit, effect=Record() as record):
                self._records.take(unit, self._with_context(unit, record))
            case sup.ForUnit(effect=PollRole()):
                self._watch.poll_now()
            case sup.ForUnit(unit=unit, effect=inner):
                self._children.perform(unit, inner)

    def _with_context(self, unit: str, record: Record) -> Record:
        """Every event of a child says which one, and for which binding (audits of several hosts stand on it)."""
        living = self._children.living.get(unit)
        if living is None:
            return record
        pid = living.identity.pid if living.identity is not None else None
        context = (("generation", living.generation), ("term", living.binding.term), ("child_pid", pid))
        return Record(record.kind, record.reason, (*record.fields, *context))

    def _feed_child(self, unit: str, event: object) -> None:
        self._driver.feed(sup.ChildHappened(unit, event))  # type: ignore[arg-type]  # Children feeds ChildEvents

    def _binding_held(self) -> Binding | None:
        """Read in lanes too: one attribute load of an immutable state."""
        return role_part.held_binding(self._driver.state.role)

    def _to_keep(self) -> Kept:
        return kept(self._driver.state, self._children.living)

    def _told_by_controller(self) -> dict[str, Any]:
        """The controller's counters as it last told them."""
        return to_builtins(self._watch.seen) if self._watch.seen is not None else {}

    def _after_burst(self) -> None:
        """After every burst of events, which the polls make at least a few times a second."""
        self._keeper.keep()
        now_s = self._loop.time()
        if self._watchdog_s and now_s - self._watchdog_at > self._watchdog_s / 2:
            self._watchdog_at = now_s
            sd_notify(WATCHDOG=1)  # fed by progress of this very loop, never by a timer of its own
        if now_s - self._ensured_at > 1.0 and (self._ensuring is None or self._ensuring.done()):
            self._ensured_at = now_s
            self._ensuring = asyncio.ensure_future(self._ensure_socket())

    async def _ensure_socket(self) -> None:
        found = await self._control.ensure()
        if found:
            self._records.take("", Record("control.recreated", found))

    # ------------------------------------------------------------------ what the verbs do

    @property
    def driver(self) -> Driver:
        """The holder of the core's state."""
        return self._driver

    @property
    def records(self) -> Records:
        """The taker of events."""
        return self._records

    def status(self) -> view.View:
        """Return the whole picture as of now."""
        config = self.config
        about = view.SupervisorView(
            pid=os.getpid(),
            version=__version__,
            host=socket.gethostname(),
            controller_id=config.controller.id,
            controller_address=config.controller.address,
            since_s=clock.now().since(self._started) / 1e9,
            tree=self._forest.why,
            config_file=str(config.file),
        )
        degraded = tuple(text for text in (self._journal.problem, self._keeper.problem, self._expiry()) if text)
        counters = {
            **self._control.counters,
            "journal.lost": self._journal.lost,
            "log.lost": logs.lost(),
            "events": self._records.count,
            "lanes.depth": self._lanes.depth,
            "loop.gap_ms_max": self._driver.gap_ns_max // NS_PER_MS,
        }
        state, policy = self._driver.state, self._driver.policy
        recent = {unit: tuple(events) for unit, events in self._records.recent.items()}
        return report.make(state, policy, clock.now(), time.time(), about, self._watch.seen, recent, degraded, counters)

    def reload(self) -> str:
        """Read the configuration again. A broken one changes nothing (S25). Returns what was wrong, "" if nothing."""
        try:
            new = load(self.config.file)
            changed = diff(self.config, new)
            warning = self._tls.reload() if self._tls is not None else None
        except ConfigError as error:
            self._records.take("", Record("config.refused", str(error)))
            return str(error)
        if warning:
            self._records.take("", Record("tls.kept_old", warning))
        if changed.refused:
            self._records.take("", Record("config.restart_needed", f"kept as they were: {', '.join(changed.refused)}"))
            new = _with_places_of(self.config, new)
        before = self._driver.policy
        self.config = new
        self._children.use(new)
        self._watch.retime(new.role.poll_interval_ms, new.role.request_deadline_ms)
        removed = {name: before.units[name] for name in changed.removed}
        restart = frozenset(change.name for change in changed.changed if change.restart)
        self._driver.feed(sup.UnitsReloaded(restart, removed, self._policy(new)))
        return ""

    def _policy(self, config: Config) -> sup.Policy:
        return sup.Policy(role_policy(config), {unit.name: unit_policy(unit) for unit in config.units})

    def _expiry(self) -> str:
        """Return a complaint when our certificate ends within 14 days (A2)."""
        if self._tls is None:
            return ""
        days = (self._tls.expires_at() - time.time()) / 86_400
        return f"our certificate expires in {days:.1f} days" if days < 14 else ""

    def _tell(self, loaded: Loaded, found: list[adoption.Survivor]) -> None:
        """Say what was found at the start, then adopt it."""
        take = self._records.take
        take("", Record("supervisor.started", "", (("pid", os.getpid()), ("version", __version__), ("tree", self._forest.why))))
        if loaded.refused:
            take("", Record("state.refused", loaded.refused, (("moved_to", str(loaded.moved_to or "")),)))
        for unit in loaded.forgotten:
            take(unit, Record("child.forgotten", "its record is of an earlier boot"))
        for survivor in found:
            self._children.adopt(survivor.unit, survivor.living, survivor.members)


def _on_bug(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback failed. The state may be anything now, so end at once: children go on, and our successor adopts them (S17)."""
    error = context.get("exception")
    if error is None or (isinstance(error, OSError) and ("transport" in context or "protocol" in context)):
        log.warning("loop.complained", reason=context.get("message", ""), error=repr(error))
        return
    log.critical("supervisor.crashed", reason=context.get("message", ""), exc_info=error)
    os._exit(BUG)


def _on_orphan(exited: Exited) -> None:
    log.debug("orphan.reaped", pid=exited.identity.pid, reason=exited.text)


def forest_name(config: Config) -> str:
    """Return the name of our trees: the same over restarts, another one for every supervisor of this host."""
    return f"{config.controller.id}-{zlib.crc32(str(config.supervisor.state_dir).encode()):08x}"


def _with_places_of(old: Config, new: Config) -> Config:
    """Return `new` with what only another supervisor process could change taken from `old`."""
    supervisor = structs.replace(new.supervisor, state_dir=old.supervisor.state_dir, run_dir=old.supervisor.run_dir)
    folders = structs.replace(new.folders, cgroup_root=old.folders.cgroup_root)
    return structs.replace(new, supervisor=supervisor, controller=old.controller, folders=folders)


def _tls(config: Config) -> TlsSource | None:
    tls = config.tls
    if tls.insecure or tls.ca is None or tls.cert is None or tls.key is None:
        log.warning("tls.off", reason="whoever reaches the controller's port can stop or start schedulers")
        return None
    return TlsSource(TlsFiles(tls.ca, tls.cert, tls.key))


def _make_folders(config: Config) -> None:
    for folder in (config.supervisor.state_dir, config.supervisor.run_dir):
        try:
            folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made: {error.strerror}; make it, or name another one") from error


def _watchdog_s() -> float:
    """Return systemd's watchdog period in seconds, 0 when it has none for us."""
    told, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not told.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(told) / 1e6
