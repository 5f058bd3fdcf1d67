"""From a store's URL to its engine.

* sqlite:///var/lib/xce/store.db?lease_ms=1000          controllers of one machine
* etcd://h1:2379,h2:2379,h3:2379/xce/main?ttl_s=5&ca=/etc/xce/ca.pem&cert=...&key=...    several machines
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote

from xce_supervisor.errors import ConfigError
from xce_supervisor.store.engine import Engine
from xce_supervisor.store.sqlite import LEASE_S_DEFAULT, SqliteEngine

_FORMS = "sqlite:///PATH or etcd://HOST:PORT,HOST:PORT,HOST:PORT"


def open_engine(url: str) -> Engine:
    """Return the engine for `url`, not yet started. Call it on the running loop.

    Raises:
        ConfigError: the URL cannot be used; the text names the part and the reason.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ConfigError(f"store {url!r}: not a store's address; write {_FORMS}")
    place, _, query = rest.partition("?")
    options = _options(url, query)
    if scheme == "sqlite":
        return _open_sqlite(url, unquote(place), options)
    if scheme == "etcd":
        return _open_etcd(url, unquote(place), options)
    raise ConfigError(f"store {url!r}: no engine is called {scheme!r}; write {_FORMS}")


def _open_sqlite(url: str, place: str, options: dict[str, str]) -> Engine:
    lease_ms = _number(url, options, "lease_ms", LEASE_S_DEFAULT * 1000, low=200, high=600_000)
    _refuse_rest(url, options)
    if not place or place.endswith("/"):
        raise ConfigError(f"store {url!r}: names no file; write sqlite:///PATH/TO/store.db")
    return SqliteEngine(Path(place), lease_ms / 1000)


def _open_etcd(url: str, place: str, options: dict[str, str]) -> Engine:
    try:  # only here, so that nobody else needs the extra or pays for loading it
        from xce_supervisor.store.etcd import PREFIX_DEFAULT, TTL_S_DEFAULT, EtcdEngine
        from xce_supervisor.store.etcd_calls import EtcdTls
    except ImportError as error:
        raise ConfigError(
            f"store {url!r}: {error.name} is missing; install the extra: pip install 'xce-supervisor[etcd]'"
        ) from error
    members, slash, prefix = place.partition("/")
    endpoints = [_endpoint(url, member) for member in members.split(",")]
    if len(set(endpoints)) != len(endpoints):
        raise ConfigError(f"store {url!r}: names a member twice")
    ttl_s = _number(url, options, "ttl_s", TTL_S_DEFAULT, low=1, high=600)
    if ttl_s != int(ttl_s):
        raise ConfigError(f"store {url!r}: ttl_s={ttl_s}: etcd counts whole seconds")
    paths = {key: Path(options.pop(key)) for key in ("ca", "cert", "key") if key in options}
    _refuse_rest(url, options)
    if ("cert" in paths) != ("key" in paths) or (paths and "ca" not in paths):
        raise ConfigError(f"store {url!r}: give ca alone, or ca, cert and key together")
    tls = EtcdTls(paths["ca"], paths.get("cert"), paths.get("key")) if paths else None
    return EtcdEngine(endpoints, f"/{prefix.strip('/')}" if slash and prefix.strip("/") else PREFIX_DEFAULT, int(ttl_s), tls)


def _endpoint(url: str, member: str) -> str:
    host, colon, port = member.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ConfigError(f"store {url!r}: member {member!r} is not HOST:PORT")
    return member


def _options(url: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"store {url!r}: after '?' come key=value pairs joined by '&'; {error}") from error
    for key, value in pairs:
        if key in options:
            raise ConfigError(f"store {url!r}: option {key!r} is given twice")
        options[key] = value
    return options


def _number(url: str, options: dict[str, str], key: str, default: float, *, low: float, high: float) -> float:
    text = options.pop(key, None)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"store {url!r}: {key}={text} is not a number") from error
    if not low <= value <= high:
        raise ConfigError(f"store {url!r}: {key}={text} is out of bounds; give {low:g} to {high:g}")
    return value


def _refuse_rest(url: str, options: dict[str, str]) -> None:
    for key in options:
        raise ConfigError(f"store {url!r}: unknown option {key!r}; see docs/stores.md")
