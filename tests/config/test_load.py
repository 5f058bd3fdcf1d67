"""Loading a configuration: what is right becomes values, what is wrong is told by file, key and reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from xce_supervisor.config import load, load_places, role_policy, shipped_units, unit_policy
from xce_supervisor.core.words import NS_PER_S
from xce_supervisor.errors import ConfigError

RIGHT = """
[supervisor]
state_dir = "state"
run_dir = "run"

[controller]
id = "c1"
address = "127.0.0.1:7400"

[tls]
insecure = true
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write supervisor.toml (and unit files by name) and return its path."""

    def put(text: str = RIGHT, **units: str) -> Path:
        if units:
            (tmp_path / "units").mkdir(exist_ok=True)
            for name, unit in units.items():
                (tmp_path / "units" / f"{name}.toml").write_text(unit, encoding="utf-8")
            text += '\n[units]\ndirectories = ["units"]\n'
        file = tmp_path / "supervisor.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return put


def _unit(name: str = "one", binding: str = "always", command: str = '["/bin/true"]', rest: str = "") -> str:
    return f'[unit]\nname = "{name}"\nbinding = "{binding}"\ncommand = {command}\n{rest}'


def refused(file: Path) -> list[str]:
    """Return the lines of the refusal."""
    with pytest.raises(ConfigError) as caught:
        load(file)
    return str(caught.value).splitlines()


def test_a_small_file_gives_the_documented_defaults(write: Write, tmp_path: Path) -> None:
    """Three sections are enough; the shipped scheduler is there, and folders are taken relative to the file."""
    config = load(write())
    assert [unit.name for unit in config.units] == ["scheduler"]
    assert (config.supervisor.state_dir, config.supervisor.run_dir) == (tmp_path / "state", tmp_path / "run")
    assert config.role.poll_interval_ms == 250
    assert role_policy(config).unknown_limit_ns == 3 * NS_PER_S
    policy = unit_policy(config.units[0])
    assert (policy.role_bound, policy.session_readiness, policy.stop_on_leave) == (True, True, False)
    assert (policy.exit_push_ns, policy.grace_ns, policy.wedge_grace_ns) == (NS_PER_S, 5 * NS_PER_S, NS_PER_S)
    assert (policy.stall.stall_timeout_ns, policy.stall.join_timeout_ns) == (10 * NS_PER_S, 10 * NS_PER_S)


def test_the_controllers_id_is_filled_into_default_folders(write: Write) -> None:
    """Supervisors of several controllers on one host do not meet in one folder."""
    config = load(write('[controller]\nid = "c7"\naddress = "127.0.0.1:1"\n[tls]\ninsecure = true\n'))
    assert str(config.supervisor.state_dir) == "/var/lib/xce-supervisor/c7"
    assert str(config.supervisor.run_dir) == "/run/xce-supervisor/c7"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[controller]", "[controler]"), "controler: unknown section or key; did you mean controller?"),
        (("insecure", "insecur"), "tls.insecur: unknown key; did you mean insecure?"),
        (("[tls]\n", "[tls]\npoll_interval_ms = 3\n"), "tls.poll_interval_ms: unknown key; it belongs into [role]"),
        (('id = "c1"\n', ""), "controller.id: is missing."),
        (('id = "c1"', "id = 1"), "controller.id: 1 cannot be used: expected str, got int."),
        (('"127.0.0.1:7400"', '["a:1", "b:1"]'), "controller.address: ['a:1', 'b:1'] cannot be used: expected str, got array."),
        (('"127.0.0.1:7400"', '"a:1,b:1"'), "controller.address: 'a:1,b:1' names more than one address"),
        (('"127.0.0.1:7400"', '"localhost"'), "controller.address: 'localhost' is not \"host:port\""),
        (('"127.0.0.1:7400"', '"host:70000"'), "controller.address: port 70000 is not between 1 and 65535"),
        (('"127.0.0.1:7400"', '"https://host:70"'), "controller.address: 'https://host:70' is a URL"),
        (("insecure = true", ""), "tls.ca: ca, cert, key missing; give ca, cert and key"),
        (("insecure = true", 'ca = "x"\ninsecure = true'), "tls.insecure: contradicts ca, cert, key"),
        (
            ("insecure = true", "insecure = true\n[role]\npoll_interval_ms = 1"),
            "role.poll_interval_ms: 1 cannot be used: expected int >= 10.",
        ),
        (
            ("insecure = true", "insecure = true\n[role]\npoll_interval_ms = 1000"),
            "role.poll_interval_ms: 1000 must be below role.request_deadline_ms (1000)",
        ),
        (
            ("insecure = true", "insecure = true\n[role]\nunknown_limit_ms = 900"),
            "role.request_deadline_ms: 1000 must be below role.unknown_limit_ms (900)",
        ),
        (
            ("insecure = true", "insecure = true\n[role]\nhold_down_ms_min = 6000"),
            "role.hold_down_ms_min: 6000 is above role.hold_down_ms_max (5000)",
        ),
        (
            ("insecure = true", "insecure = true\n[role]\ncalm_s = 2"),
            "role.calm_s: 2 s must be longer than role.hold_down_ms_max",
        ),
        (("insecure = true", 'insecure = true\n[units]\ndirectories = ["nowhere"]'), "units.directories:"),
        (('state_dir = "state"', "state_dir = 5"), "supervisor.state_dir: 5 cannot be used"),
        (("[supervisor]\n", "supervisor = 3\n[other]\n"), "supervisor: must be a section: write [supervisor]"),
    ],
)
def test_a_wrong_setting_is_refused_by_key_and_reason(write: Write, change: tuple[str, str], said: str) -> None:
    """One change to a right file, one refusal that names it."""
    assert change[0] in RIGHT
    file = write(RIGHT.replace(change[0], change[1], 1))
    lines = refused(file)
    assert any(line.startswith(f"{file}: {said}") for line in lines), lines


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        (_unit(name="two"), "unit.name: 'two' must be the file's name without .toml, 'one'"),
        (_unit(binding="rol"), "unit.binding: 'rol' cannot be used: invalid enum value 'rol'."),
        (_unit(command="[]"), "unit.command: [] cannot be used: expected array of length >= 1."),
        (_unit(command='["bin/true"]'), "unit.command[0]: 'bin/true' must be a bare name or an absolute path"),
        (_unit(command='["x", "{pid}"]'), "unit.command[1]: unknown placeholder {pid}"),
        (_unit(command='["x", "{term!r}"]'), "unit.command[1]: unknown placeholder {term}"),
        (_unit(command='["x", "{"]'), "unit.command[1]: '{': "),
        (_unit(command='["x", "a\\u0000b"]'), "unit.command[1]: holds a NUL byte"),
        (_unit(rest="[stop]\ngrace_s = 25\n"), "stop: the kill ladder takes exit_push_s + grace_s + kill_limit_s = 31 s"),
        (_unit(rest="[stop]\nwedge_grace_s = 6\n"), "stop.wedge_grace_s: 6 s is above stop.grace_s (5 s)"),
        (_unit(rest="[stop]\ngrace = 6\n"), "stop.grace: unknown key; did you mean grace_s?"),
        (_unit(rest="[restart]\ndelay_s = 31\n"), "restart.delay_s: 31 s is above restart.delay_s_max (30 s)"),
        (_unit(rest="[stall]\nconfirm_s = 10\n"), "stall.confirm_s: 10 s must be below stall.timeout_s (10 s)"),
        (_unit(rest="[restart]\njitter = nan\n"), "restart.jitter: nan cannot be used"),
        (_unit(rest="[stop]\ngrace_s = inf\n"), "stop.grace_s: inf cannot be used"),
        (_unit(rest="[stop]\ngrace_s = true\n"), "stop.grace_s: True cannot be used"),
        (_unit(rest="[limits]\nnofil = 3\n"), "limits: {'nofil': 3} cannot be used"),
        (_unit(rest='[limits]\nnofile = "9:3"\n'), "limits.nofile: soft limit 9 is above hard limit 3"),
        (_unit(rest="[limits]\nnofile = -1\n"), "limits.nofile: -1 is not a limit"),
        (_unit(rest="[environment]\nset = {NOTIFY_SOCKET = '/x'}\n"), "environment.set.NOTIFY_SOCKET: is reserved"),
        (_unit(rest="[environment]\nset = {XCE_TOKEN = '/x'}\n"), "environment.set.XCE_TOKEN: is reserved"),
        (_unit(rest="[environment]\npass = ['WATCHDOG_USEC']\n"), "environment.pass.WATCHDOG_USEC: is reserved"),
        (_unit(rest="[environment]\nset = {'A-B' = '/x'}\n"), "environment.set: 'A-B' is no name of a variable"),
        (_unit(rest="[output]\nkind = 'file'\n"), "output.path: is missing"),
        (_unit(rest="[output]\nkind = 'null'\npath = 'x'\n"), "output.path: is for kind"),
        (_unit(rest="[readiness]\nkind = 'session'\n"), 'readiness.kind: "session" needs binding = "role"'),
        (
            _unit(binding="role", rest="[readiness]\nkind = 'session'\n"),
            'unit.command: readiness.kind = "session" needs {spawn_token}',
        ),
        (_unit(rest="").replace("command", "cwd = 'here'\ncommand"), "unit.cwd: 'here' is not absolute"),
        (_unit(rest="").replace("command", "umask = '8'\ncommand"), "unit.umask: '8' cannot be used"),
    ],
)
def test_a_wrong_unit_is_refused_by_key_and_reason(write: Write, tmp_path: Path, unit: str, said: str) -> None:
    """The refusal names the unit's own file."""
    lines = refused(write(one=unit))
    assert any(line.startswith(f"{tmp_path}/units/one.toml: {said}") for line in lines), lines


@pytest.mark.parametrize(
    "command",
    [
        '["x", "--controller", "{controller_address}", "--controller", "10.0.0.2:7400"]',
        '["x", "--controllers", "{controller_address},10.0.0.2:7400"]',
        '["x", "--controller={controller_address}", "--peer=host-b:7400"]',
        '["x", "{controller_address}", "[::1]:7400"]',
        '["x", "{controller_address}", "{controller_address}"]',
        '["x", "--controllers={controller_address},{controller_address}"]',
    ],
)
def test_a_unit_that_passes_several_addresses_is_refused(write: Write, command: str) -> None:
    """docs/rules.md S3: a scheduler gets exactly one controller address and no way to be given more."""
    (line,) = refused(write(one=_unit(binding="role", command=command)))
    assert "passes 2 controller addresses" in line and "docs/rules.md S3" in line


def test_a_unit_that_names_another_controller_is_refused(write: Write) -> None:
    """docs/rules.md S3: a single literal address must be that of our own controller."""
    right = _unit(binding="role", command='["x", "--controller", "127.0.0.1:7400"]')
    assert load(write(one=right)).unit("one")
    (line,) = refused(write(one=right.replace("127.0.0.1", "127.0.0.2")))
    assert "passes 127.0.0.2:7400, which is not [controller] address" in line


def test_ports_and_urls_that_are_no_controllers_are_let_through(write: Write) -> None:
    """A metrics port or a licence server is nobody's controller."""
    command = '["x", "{controller_address}", "--listen", "0.0.0.0:9000", "--licence=lic-host:27000", "http://h:80/", "/a:1"]'
    assert load(write(one=_unit(binding="role", command=command))).unit("one")


def test_a_literal_brace_is_doubled(write: Write) -> None:
    """JSON in an argument must be possible."""
    unit = load(write(one=_unit(command='["x", "{{\\"a\\": {term}}}"]'))).unit("one")
    assert unit is not None and unit.unit.command[1] == '{{"a": {term}}}'


def test_all_that_is_wrong_is_told_at_once(write: Write) -> None:
    """An operator mends a file in one go, not by one refusal after the other."""
    text = RIGHT.replace("127.0.0.1:7400", "a:1,b:1").replace("insecure = true", "[role]\ncalm_s = 2")
    lines = refused(write(text, one=_unit(name="two"), two=_unit(rest="[stop]\nx = 1\n")))
    assert len(lines) == 5, lines


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"[controller\n", "is not TOML: "),
        (b"\xff\xfe", "is not UTF-8 text: byte 0 is 0xff"),
        (b"x" * 1_048_577, "is larger than 1048576 bytes"),
        (b"a = " + b"[" * 5000, "is "),
        (b"", "[controller]: is missing"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, raw: bytes, said: str) -> None:
    """Whatever lies there, the answer is one line and no traceback."""
    file = tmp_path / "supervisor.toml"
    file.write_bytes(raw)
    (line,) = refused(file)
    assert line.startswith(f"{file}: {said}"), line


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The same for a folder in its place."""
    assert refused(tmp_path / "none.toml") == [
        f"{tmp_path}/none.toml: cannot be read: No such file or directory; create it, or name another file with --config"
    ]
    assert "Is a directory" in refused(tmp_path)[0]


def test_a_later_folder_overrides_a_unit_by_file_name(write: Write, tmp_path: Path) -> None:
    """The shipped scheduler is replaced by one of the same name, and others stay."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "scheduler.toml").write_text(_unit("scheduler", "role", '["/opt/xce/scheduler"]'), encoding="utf-8")
    (own / "metrics.toml").write_text(_unit("metrics"), encoding="utf-8")
    (own / ".hidden.toml").write_text("broken", encoding="utf-8")
    config = load(write(RIGHT + '[units]\ndirectories = ["shipped", "own"]\n'))
    assert [unit.name for unit in config.units] == ["metrics", "scheduler"]
    assert config.units[1].unit.command == ("/opt/xce/scheduler",)


def test_places_are_known_although_the_rest_is_broken(write: Write, tmp_path: Path) -> None:
    """`status` must find the socket of a supervisor whose file was broken under it."""
    text = RIGHT.replace("insecure = true", "nonsense = 3\n[role]\npoll_interval_ms = -1")
    file = write(text.replace("[supervisor]", "[supervisor]\nunknown = 1"), one="broken [")
    assert refused(file)
    places = load_places(file)
    assert places.controller_id == "c1"
    assert places.socket == tmp_path / "run" / "control.sock"
    with pytest.raises(ConfigError, match=r"controller\.id: is missing"):
        load_places(write(text.replace('id = "c1"', "")))


def test_certificates_of_children_belong_to_units(write: Write, tmp_path: Path) -> None:
    """A child shows its own certificate; a name that is no unit is a mistake."""
    tls = 'ca = "pki/ca.pem"\ncert = "a.pem"\nkey = "a.key"\n[tls.children.{}]\ncert = "s.pem"\nkey = "s.key"\n'
    config = load(write(RIGHT.replace("insecure = true", tls.format("scheduler"))))
    assert config.tls_of("scheduler") == (f"{tmp_path}/pki/ca.pem", f"{tmp_path}/s.pem", f"{tmp_path}/s.key")
    assert config.tls_of("other") == (f"{tmp_path}/pki/ca.pem", f"{tmp_path}/a.pem", f"{tmp_path}/a.key")
    (line,) = refused(write(RIGHT.replace("insecure = true", tls.format("schedular"))))
    assert "no unit is called schedular; did you mean scheduler?" in line


def test_the_shipped_units_pass_their_own_checks() -> None:
    """What comes with the program is there, in a checkout as in an installation."""
    assert [path.name for path in shipped_units()] == ["scheduler.toml"]


def test_a_config_cannot_be_changed(write: Write) -> None:
    """Values are frozen: nothing changes under the feet of who holds them."""
    config = load(write())
    with pytest.raises(AttributeError):
        config.role.poll_interval_ms = 3  # type: ignore[misc]
    assert msgspec.structs.replace(config.role, poll_interval_ms=3).poll_interval_ms == 3
