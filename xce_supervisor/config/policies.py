"""From the configuration to what each core decides by: its Policy, in nanoseconds."""

from __future__ import annotations

from xce_supervisor.config.settings import Config
from xce_supervisor.config.unit import Unit
from xce_supervisor.core.backoff import BackoffPolicy
from xce_supervisor.core.child_words import UnitPolicy
from xce_supervisor.core.role import RolePolicy
from xce_supervisor.core.stall import StallPolicy
from xce_supervisor.core.words import NS_PER_MS, NS_PER_S


def role_policy(config: Config) -> RolePolicy:
    """Return what `core.role` decides by (docs/rules.md S7, S8)."""
    role = config.role
    return RolePolicy(
        controller_id=config.controller.id,
        unknown_limit_ns=role.unknown_limit_ms * NS_PER_MS,
        quorum_age_limit_ns=role.quorum_age_limit_ms * NS_PER_MS,
        hold_down_ns_min=role.hold_down_ms_min * NS_PER_MS,
        hold_down_ns_max=role.hold_down_ms_max * NS_PER_MS,
        calm_ns=_ns(role.calm_s),
    )


def unit_policy(unit: Unit) -> UnitPolicy:
    """Return what `core.child` decides by for this unit (docs/rules.md S6, S9, S12, S13)."""
    stop, restart, stall = unit.stop, unit.restart, unit.stall
    return UnitPolicy(
        name=unit.name,
        role_bound=unit.unit.binding == "role",
        session_readiness=unit.readiness.kind == "session",
        notify_readiness=unit.readiness.kind == "notify",
        stop_on_leave=stop.on_supervisor_stop == "stop",
        stall=StallPolicy(
            stall_timeout_ns=_ns(stall.timeout_s),
            stall_confirm_ns=_ns(stall.confirm_s),
            join_timeout_ns=_ns(unit.readiness.join_timeout_s),
        ),
        backoff=BackoffPolicy(_ns(restart.delay_s), _ns(restart.delay_s_max), restart.jitter),
        healthy_ns=_ns(restart.healthy_s),
        exit_push_ns=_ns(stop.exit_push_s),
        grace_ns=_ns(stop.grace_s),
        wedge_grace_ns=_ns(stop.wedge_grace_s),
        kill_limit_ns=_ns(stop.kill_limit_s),
        spawn_retry_ns=_ns(restart.spawn_retry_s),
        spawn_retry_ns_max=_ns(restart.spawn_retry_s_max),
        spawn_retry_slow_ns=_ns(restart.spawn_retry_slow_s),
    )


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
