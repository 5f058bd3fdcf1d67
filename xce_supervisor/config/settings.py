"""What supervisor.toml may say, section by section, and the whole configuration as one frozen value.

Every field says its unit, its bounds, what it relates to, and what a wrong value does; docs/configuration.md is written from
these texts. Relations between fields are in `config.relations`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from xce_supervisor.config.unit import Unit

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


class Supervisor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program itself: where it keeps what, and how it logs."""

    state_dir: Annotated[
        Path,
        Meta(
            description="Folder that survives a reboot: state file, journal, evidence; `{controller_id}` is filled in; "
            "relative to this file. Two supervisors in one folder refuse each other's state file and neither "
            "adopts its children."
        ),
    ] = Path("/var/lib/xce-supervisor/{controller_id}")
    run_dir: Annotated[
        Path,
        Meta(
            description="Folder of the control socket and the children's notify sockets; `{controller_id}` is filled in; "
            "relative to this file. Where others can write, they can take the socket away (it is made anew)."
        ),
    ] = Path("/run/xce-supervisor/{controller_id}")
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least level that is logged. At `error`, a restarted child leaves a trace only in the journal."),
    ] = "info"
    log_format: Annotated[
        Literal["json", "text"],
        Meta(description="`json`: one object a line on standard error, for systemd's journal; `text`: for people."),
    ] = "json"
    journal_bytes_max: Annotated[
        int,
        Meta(
            ge=65_536,
            le=1_073_741_824,
            description="Bytes of the event journal before it is rotated. Small: history is short; large: `events` is slow.",
        ),
    ] = 16_777_216
    journal_files_max: Annotated[
        int,
        Meta(ge=2, le=100, description="Journal files kept, the one being written included. The oldest is removed."),
    ] = 5
    stop_limit_s: Annotated[
        float,
        Meta(
            ge=1,
            le=600,
            description="Seconds in which any stop must be over. Must be longer than each unit's kill ladder (exit_push_s + "
            "grace_s + kill_limit_s), and shorter than the service manager's own limit (TimeoutStopSec=45 in "
            "our unit), which else kills us.",
        ),
    ] = 30.0


class Controller(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one controller that is watched (docs/rules.md S3)."""

    id: Annotated[
        str,
        Meta(
            pattern=NAME,
            description='Name of the controller, e.g. "c1". An answer of any other id counts as no answer: nothing is started.',
        ),
    ]
    address: Annotated[
        str,
        Meta(
            max_length=300,
            description='Exactly one "host:port", e.g. "127.0.0.1:7400" or "[::1]:7400". Several are refused: a scheduler '
            "is pinned to one controller. A wrong one leaves the role unknown.",
        ),
    ]


class TlsPair(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A certificate and its key."""

    cert: Path
    key: Path


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the controller is known to be the right one. Either all of ca, cert and key, or `insecure = true`."""

    ca: Annotated[Path | None, Meta(description="PEM file of the authority that signed the controller's certificate.")] = None
    cert: Annotated[
        Path | None, Meta(description="PEM file of our certificate; its URI SAN names us: xce://CLUSTER/supervisor/NAME.")
    ] = None
    key: Annotated[Path | None, Meta(description="PEM file of the certificate's private key; readable by us alone.")] = None
    children: Annotated[
        dict[str, TlsPair],
        Meta(
            description="Certificates of children, by unit: [tls.children.scheduler] with cert and key, filled in for {tls_cert} "
            "and {tls_key}. The controller refuses a scheduler that shows a supervisor's certificate."
        ),
    ] = field(default_factory=dict)
    insecure: Annotated[
        bool,
        Meta(
            description="Speak without TLS. Whoever can reach the port can then stop or start schedulers; for tests on one "
            "machine."
        ),
    ] = False


class RoleWatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the controller's role is watched (docs/rules.md S7, S8)."""

    poll_interval_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=10_000,
            description="Milliseconds between questions where the controller serves no long poll. Shorter than "
            "request_deadline_ms. Large: a demotion is seen late by as much.",
        ),
    ] = 250
    request_deadline_ms: Annotated[
        int,
        Meta(
            ge=50,
            le=30_000,
            description="Milliseconds for each answer. Longer than poll_interval_ms, shorter than unknown_limit_ms. Small: "
            "a busy controller counts as silent; large: a silent one is noticed late.",
        ),
    ] = 1000
    unknown_limit_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=120_000,
            description="Milliseconds that children may go on while the role is unknown. Longer than request_deadline_ms. "
            "Small: a hiccup costs a restart; large: two schedulers may run side by side after a partition.",
        ),
    ] = 3000
    quorum_age_limit_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=120_000,
            description="Milliseconds since a quorum last confirmed a primary; older counts as unknown. Longer than "
            "poll_interval_ms. Large: a partitioned primary is believed for as long.",
        ),
    ] = 5000
    hold_down_ms_min: Annotated[
        int,
        Meta(
            ge=0,
            le=60_000,
            description="Milliseconds of the first wait before a start while the role flaps. At most hold_down_ms_max.",
        ),
    ] = 250
    hold_down_ms_max: Annotated[
        int,
        Meta(
            ge=0,
            le=600_000,
            description="Milliseconds to which that wait doubles. Large: after the last flap the scheduler is late.",
        ),
    ] = 5000
    calm_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="Seconds without a change of role after which flaps are forgotten. Longer than hold_down_ms_max.",
        ),
    ] = 60.0


class UnitFolders(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where unit files come from, and how their processes are held together."""

    directories: Annotated[
        tuple[Path, ...],
        Meta(
            max_length=16,
            description="Folders of unit files, each overriding those before it by file name; relative to this file. "
            "`shipped` stands for the ones that come with the program. A folder named here must exist, save "
            "/etc/xce-supervisor/units.",
        ),
    ] = (Path("shipped"), Path("/etc/xce-supervisor/units"))
    cgroup_root: Annotated[
        str,
        Meta(
            pattern=r"^(auto|off|/.*)$",
            description="Folder of cgroup v2 below which each child gets its own group; `auto`: below the supervisor's own; "
            "`off`: process groups and adopted descendants only, which takes longer to clear what a child "
            "leaves behind.",
        ),
    ] = "auto"


class SupervisorFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of supervisor.toml."""

    controller: Controller
    supervisor: Supervisor = Supervisor()
    tls: Tls = Tls()
    role: RoleWatch = RoleWatch()
    units: UnitFolders = UnitFolders()


class Config(Struct, frozen=True, kw_only=True):
    """A checked configuration: all paths absolute, all placeholders of paths filled in, all relations true.

    file: where it was read from. units: in order of name.
    """

    file: Path
    supervisor: Supervisor
    controller: Controller
    tls: Tls
    role: RoleWatch
    folders: UnitFolders
    units: tuple[Unit, ...]

    def tls_of(self, unit: str) -> tuple[str, str, str]:
        """Return ca, certificate and key for a child of that unit; three empty texts where TLS is off."""
        if self.tls.insecure:
            return "", "", ""
        own = self.tls.children.get(unit)
        cert, key = (own.cert, own.key) if own is not None else (self.tls.cert, self.tls.key)
        return str(self.tls.ca), str(cert), str(key)

    def unit(self, name: str) -> Unit | None:
        """Return the unit of that name, None if there is none."""
        return next((unit for unit in self.units if unit.name == name), None)


class Places(Struct, frozen=True, kw_only=True):
    """Where a supervisor keeps what verbs need, even if the rest of its configuration is broken by now."""

    file: Path
    controller_id: str
    controller_address: str
    state_dir: Path
    run_dir: Path

    @property
    def socket(self) -> Path:
        """The control socket."""
        return self.run_dir / "control.sock"

    @property
    def state_file(self) -> Path:
        """The state file."""
        return self.state_dir / "state.json"

    @property
    def journal(self) -> Path:
        """The event journal that is being written; older ones have .1, .2 ... at the end."""
        return self.state_dir / "journal.jsonl"

    @property
    def last_status(self) -> Path:
        """The last status that a supervisor wrote down, shown when it does not answer."""
        return self.run_dir / "status.json"
