"""What a unit file may say: a child that is run, what it is bound to, how it is stopped and when it is started again.

Every field says its unit, its bounds, what it relates to, and what a wrong value does; docs/configuration.md is written from
these texts. Relations between fields are in `config.relations`, placeholders in `config.command`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

LimitName = Literal[
    "as", "core", "cpu", "data", "fsize", "memlock", "msgqueue", "nice", "nofile", "nproc", "rss", "rtprio", "rttime",
    "sigpending", "stack",
]  # fmt: skip


class What(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is run, and as whom."""

    name: Annotated[
        str,
        Meta(pattern=r"^[a-z][a-z0-9@._-]{0,47}$", description="Name of the unit; the same as the file's name without .toml."),
    ]
    binding: Annotated[
        Literal["role", "always"],
        Meta(
            description="`role`: runs while our controller is primary, once per term; `always`: runs as long as the "
            "supervisor does. `always` on a scheduler would run it beside standbys too."
        ),
    ]
    command: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            max_length=256,
            description="Program and arguments, no shell. A bare program name is looked for beside our own program, then in "
            "PATH. Placeholders: see below. Exactly one controller address may be passed.",
        ),
    ]
    cwd: Annotated[
        Path, Meta(description="Absolute working folder. Missing: the unit cannot start, and says so by this name.")
    ] = Path("/")
    umask: Annotated[
        str,
        Meta(pattern=r"^0?[0-7]{3}$", description='Octal, in quotes, e.g. "027". Loose: others read what the child writes.'),
    ] = "022"
    user: Annotated[
        str,
        Meta(max_length=64, description="Login name or number to run as; empty: as the supervisor. Only root can change it."),
    ] = ""
    group: Annotated[
        str, Meta(max_length=64, description="Group name or number; empty: the user's own. Only root can change it.")
    ] = ""


class Environment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The child's whole environment: nothing else is inherited (docs/rules.md S18)."""

    set: Annotated[
        dict[str, str],
        Meta(
            description="Variables with their values; placeholders are filled in. Those of the service manager and XCE_* "
            "are refused."
        ),
    ] = field(default_factory=dict)
    pass_: Annotated[
        tuple[str, ...],
        Meta(description="Names of variables taken over from the supervisor's environment where they are set there."),
    ] = field(name="pass", default=("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR"))


class Output(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where standard output and standard error go. Never a pipe that could block the child (docs/rules.md S20)."""

    kind: Annotated[
        Literal["journal", "file", "null", "inherit"],
        Meta(
            description="`journal`: systemd's journal under the unit's name, or the file output/UNIT.log of state_dir where "
            "there is none; `file`: `path`, opened for append; `null`: thrown away; `inherit`: the supervisor's "
            "own."
        ),
    ] = "journal"
    path: Annotated[
        str,
        Meta(description="File for kind `file`; placeholders are filled in; relative to state_dir. Refused for other kinds."),
    ] = ""


class Readiness(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a child is known to be at work."""

    kind: Annotated[
        Literal["session", "notify", "none"],
        Meta(
            description="`session`: the controller reports a scheduler session with our spawn token (needs binding `role`); "
            "`notify`: READY=1 on NOTIFY_SOCKET; `none`: as soon as it runs."
        ),
    ] = "none"
    join_timeout_s: Annotated[
        float,
        Meta(
            ge=0.1, le=3600, description="Seconds from spawn to session; later counts as wedged. Small: slow starts are killed."
        ),
    ] = 10.0


class Stop(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stop ladder: exit push, SIGTERM and SIGCONT, SIGKILL to the tree (docs/rules.md S6)."""

    exit_push_s: Annotated[
        float,
        Meta(
            ge=0, le=60, description="Seconds for the controller's exit push to end the child before it gets SIGTERM; 0 skips it."
        ),
    ] = 1.0
    grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=300,
            description="Seconds from SIGTERM to SIGKILL. Large: a deaf child delays the fail-over by as much; 0 kills at once.",
        ),
    ] = 5.0
    kill_limit_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=300,
            description="Seconds after SIGKILL until a tree that is still there is called unkillable. The sum of the three "
            "must be below [supervisor] stop_limit_s.",
        ),
    ] = 5.0
    wedge_grace_s: Annotated[
        float,
        Meta(
            ge=0, le=300, description="Seconds from SIGTERM to SIGKILL for a wedged child, which seldom hears. At most grace_s."
        ),
    ] = 1.0
    on_supervisor_stop: Annotated[
        Literal["leave", "stop"],
        Meta(
            description="When the supervisor itself is stopped: `leave` the child running for the next one to adopt, or "
            "`stop` it. With `stop`, an upgrade of the supervisor interrupts scheduling."
        ),
    ] = "leave"


class Restart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a child that crashed or wedged, or could not be spawned, is tried again (docs/rules.md S12, S13)."""

    delay_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds before the second retry (the first is at once); doubles from there. At most delay_s_max.",
        ),
    ] = 0.5
    delay_s_max: Annotated[
        float, Meta(ge=0, le=86_400, description="Seconds to which the delay grows. Large: late after a repair.")
    ] = 30.0
    jitter: Annotated[
        float, Meta(ge=0, le=0.9, description="Share of the delay that chance adds or takes. 0: hosts retry in step.")
    ] = 0.2
    healthy_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds of running after which earlier crashes are forgotten. Small: a crash loop is fast for ever.",
        ),
    ] = 60.0
    spawn_retry_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=60,
            description="Seconds before a spawn that failed for a passing reason (EAGAIN, ETXTBSY) is tried again; doubles.",
        ),
    ] = 0.1
    spawn_retry_s_max: Annotated[
        float, Meta(ge=0.01, le=600, description="Seconds to which that doubles. At least spawn_retry_s.")
    ] = 2.0
    spawn_retry_slow_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400,
            description="Seconds before a spawn that failed for a lasting reason (missing, not executable) is tried again, "
            "if the file does not change before. At least spawn_retry_s_max.",
        ),
    ] = 30.0


class Stall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a child that is joined and alive counts as wedged (docs/rules.md S9)."""

    timeout_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400,
            description="Seconds that the oldest push may stay without being acted on. Small: long scheduling cycles are "
            "killed; large: jobs pend as long behind a hung scheduler.",
        ),
    ] = 10.0
    confirm_s: Annotated[
        float,
        Meta(ge=0, le=3600, description="Seconds until a second look must see no progress either. Shorter than timeout_s."),
    ] = 1.0


class Unit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of a unit file. limits: name of a resource limit to "SOFT:HARD", one number for both, or "unlimited"."""

    unit: What
    limits: Annotated[
        dict[LimitName, int | str],
        Meta(
            description='Resource limits by the names of prlimit(1), e.g. nofile = 65536 or nofile = "4096:65536" or core = '
            '"unlimited". Low: the child fails in its own ways; above our own hard limit: only root can set it.'
        ),
    ] = field(default_factory=dict)
    environment: Environment = Environment()
    output: Output = Output()
    readiness: Readiness = Readiness()
    stop: Stop = Stop()
    restart: Restart = Restart()
    stall: Stall = Stall()

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.unit.name

    @property
    def limit_pairs(self) -> dict[str, tuple[int, int]]:
        """Each resource limit as (soft, hard), -1 for unlimited. Only for a unit that was checked."""
        return {name: _pair(limit) for name, limit in self.limits.items()}


def _pair(limit: int | str) -> tuple[int, int]:
    soft, _, hard = str(limit).partition(":")
    numbers = [-1 if word == "unlimited" else int(word) for word in (soft, hard or soft)]
    return numbers[0], numbers[1]
