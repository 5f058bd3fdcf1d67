"""The program `xce-testbed`: the reference cluster's processes and an operator's verbs for it.

Thin on purpose: each verb turns its options into one call of `xce_supervisor.testbed`. Certificates are named by three files, or
by `--pki DIR` of `xce-testbed pki`, in which they are found by role and name; without either a process speaks in the clear.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from xce_supervisor import __version__
from xce_supervisor.cli.entry import ExitCode, enter
from xce_supervisor.cli.slim import load_structlog_alone
from xce_supervisor.cli.testbed_options import (
    cluster_options,
    json_option,
    named_files,
    operator_tls,
    split_list,
    tls_options,
)
from xce_supervisor.errors import DeadlinePassed, PeerError, Redirected, RequestRefused

if TYPE_CHECKING:
    from xce_supervisor.testbed.client import Cluster

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="xce-testbed")
def program() -> None:
    """A small but real cluster: controllers, schedulers, workers, and verbs to work with them.

    Exit codes of verbs: 0 done, 1 jobs failed or not finished, 4 nobody answered in time, 5 refused, 78 bad arguments or files.
    Those of processes are in docs/scheduler.md, docs/worker.md and docs/controller.md.
    """


@program.command()
@click.option("--id", "controller_id", required=True, metavar="ID", help='Its name, e.g. "c1".')
@click.option("--listen", required=True, metavar="HOST:PORT", help="Where it is reached; port 0 takes any free one.")
@click.option("--store", required=True, metavar="URL", help='"sqlite:///FILE" or "etcd://HOST:PORT,HOST:PORT,...".')
@click.option("--advertise", default="", metavar="HOST:PORT", help="What redirects name. Default: where it listens.")
@tls_options
@click.option("--heartbeat-ms", type=click.IntRange(10), default=1000, show_default=True, help="Between heartbeats of sessions.")
@click.option(
    "--session-timeout-ms", type=click.IntRange(20), default=3000, show_default=True, help="Until a silent session ends."
)
@click.option("--worker-lost-s", type=float, default=10.0, show_default=True, help="Until the jobs of a lost worker end.")
@click.option("--closed-gate", "gates", multiple=True, metavar="GATE", help="A promotion gate that is closed from the start.")
@click.option("--stay-primary", is_flag=True, help="Do not step down without a quorum (a mode for tests).")
def controller(
    controller_id: str,
    listen: str,
    store: str,
    advertise: str,
    pki: Path | None,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
    heartbeat_ms: int,
    session_timeout_ms: int,
    worker_lost_s: float,
    gates: tuple[str, ...],
    stay_primary: bool,
) -> int:
    """Run one controller until SIGTERM."""
    _log()
    from xce_supervisor.testbed.controller import serve
    from xce_supervisor.testbed.controller_config import ControllerConfig

    return serve(
        ControllerConfig(
            controller_id=controller_id,
            listen=listen,
            store=store,
            advertise=advertise,
            tls=named_files(pki, f"controller-{controller_id}", tls_ca, tls_cert, tls_key),
            heartbeat_ms=heartbeat_ms,
            session_timeout_ms=session_timeout_ms,
            worker_lost_s=worker_lost_s,
            steps_down=not stay_primary,
            gates=gates,
        )
    )


@program.command()
@click.option("--controller", "address", required=True, metavar="HOST:PORT", help="The one controller it is pinned to.")
@click.option("--controller-id", required=True, metavar="ID", help="The id that controller must have.")
@click.option("--term", required=True, type=click.IntRange(0), help="The term it is started for.")
@click.option("--spawn-token", default="", metavar="TOKEN", help="Shown in the join, so that its supervisor knows the session.")
@click.option("--name", default="scheduler", show_default=True, metavar="NAME", help="Its name in the join.")
@tls_options
@click.option(
    "--fault", default="", envvar="XCE_SCHEDULER_FAULTS", metavar="FAULTS", help="For tests; docs/scheduler.md lists them."
)
def scheduler(
    address: str,
    controller_id: str,
    term: int,
    spawn_token: str,
    name: str,
    pki: Path | None,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
    fault: str,
) -> int:
    """Run one scheduler, pinned to one controller. What the unit `scheduler` runs."""
    _log()
    from xce_supervisor.testbed.scheduler import SchedulerConfig, serve
    from xce_supervisor.testbed.scheduler_faults import parse_faults

    return serve(
        SchedulerConfig(
            address=address,
            controller_id=controller_id,
            term=term,
            spawn_token=spawn_token,
            name=name,
            tls=named_files(pki, f"scheduler-{name}", tls_ca, tls_cert, tls_key),
            faults=parse_faults(fault),
        )
    )


@program.command()
@click.option("--name", required=True, metavar="NAME", help="Its name, unique in the cluster.")
@click.option("--controllers", required=True, metavar="HOST:PORT,...", help="All controllers; it follows the primary.")
@click.option("--dir", "directory", required=True, type=click.Path(file_okay=False, path_type=Path), help="Its own folder.")
@click.option("--slots", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Job slots that it offers.")
@tls_options
def worker(
    name: str,
    controllers: str,
    directory: Path,
    slots: int,
    pki: Path | None,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
) -> int:
    """Run one worker until SIGTERM."""
    _log()
    from xce_supervisor.testbed.worker import WorkerConfig, serve

    return serve(
        WorkerConfig(
            name=name,
            controllers=split_list(controllers),
            directory=directory,
            slots=slots,
            tls=named_files(pki, f"worker-{name}", tls_ca, tls_cert, tls_key),
        )
    )


@program.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.argument("subjects", nargs=-1, metavar="ROLE/NAME...")
@click.option("--cluster", default="testbed", show_default=True, metavar="NAME", help="Name of the cluster in the certificates.")
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="A name or address that they answer for besides localhost.")
@click.option("--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="How long they last.")
@json_option
def pki(directory: Path, subjects: tuple[str, ...], cluster: str, hosts: tuple[str, ...], days: int, as_json: bool) -> int:
    """Make a local authority in DIRECTORY, and a certificate for each ROLE/NAME. Asking again changes nothing that still serves.

    Roles: controller, supervisor, scheduler, worker, provisioner, operator. E.g.:
    xce-testbed pki pki controller/c1 supervisor/c1 scheduler/scheduler worker/w1 operator/admin
    """
    from xce_supervisor.cli import paper
    from xce_supervisor.testbed.pki import make_pki, parse_subject

    if not subjects:
        raise click.UsageError("name at least one ROLE/NAME, e.g. controller/c1")
    made = make_pki(directory, cluster, [parse_subject(text) for text in subjects], hosts=hosts, days=days)
    if as_json:
        paper.put_json(
            {
                "ca": str(made.ca),
                "certificates": [
                    {"uri": one.uri, "cert": str(one.cert), "key": str(one.key), "made": one.made, "expires_at": one.expires_at}
                    for one in made.certificates
                ],
            }
        )
    else:
        rows = tuple(
            ((one.uri, ""), (str(one.cert), ""), ("made" if one.made else "kept", ""), (f"{one.expires_at:%Y-%m-%d}", ""))
            for one in made.certificates
        )
        paper.put([((f"authority: {made.ca}", ""),), paper.Table(heads=("NAME", "FILE", "", "UNTIL"), rows=rows)])
    return ExitCode.OK


@program.command(context_settings={"allow_interspersed_args": False})  # what follows the command is its own
@cluster_options
@click.option("--count", type=click.IntRange(1, 100_000), default=1, show_default=True, help="How many such jobs.")
@click.option("--id", "job_id", default="", metavar="ID", help="Id of the job; makes a repeated submission harmless.")
@click.option("--slots", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Slots that each needs.")
@click.option("--rerunnable", is_flag=True, help="May be run again after its worker died.")
@click.option("--constraint", default="", metavar="PREFIX", help="Only workers whose name begins so.")
@click.option("--wait", "wait_s", type=float, default=0.0, metavar="SECONDS", help="Wait for the end.")
@json_option
@click.argument("command", nargs=-1, required=True, metavar="COMMAND...")
def submit(
    controllers: str,
    pki: Path | None,
    operator: str,
    count: int,
    job_id: str,
    slots: int,
    rerunnable: bool,
    constraint: str,
    wait_s: float,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Submit a job; across a fail-over, if there is one. Prints the ids."""
    from xce_supervisor.cli import jobs_view
    from xce_supervisor.testbed import client
    from xce_supervisor.wire.words import JobSubmit

    if job_id and count > 1:
        raise click.UsageError("--id names one job; leave out --count")
    cluster = _cluster(controllers, pki, operator)
    wanted = [
        JobSubmit(
            job_id=job_id or client.new_job_id(), command=command, slots=slots, rerunnable=rerunnable, constraint=constraint
        )
        for _ in range(count)
    ]
    ids = [job.job_id for job in wanted]
    _ask(client.submit_all(cluster, wanted))
    if not wait_s:
        jobs_view.put_ids(ids, as_json)
        return ExitCode.OK
    ended = _ask(client.wait_for_jobs(cluster, ids, deadline_s=wait_s))
    jobs_view.put(ended, as_json)
    return ExitCode.OK if all(job.state == "done" for job in ended) else ExitCode.DEGRADED


@program.command()
@cluster_options
@json_option
@click.argument("ids", nargs=-1, metavar="[ID]...")
def jobs(controllers: str, pki: Path | None, operator: str, as_json: bool, ids: tuple[str, ...]) -> int:
    """List jobs: all, or those named."""
    from xce_supervisor.cli import jobs_view
    from xce_supervisor.testbed import client

    jobs_view.put(_ask(client.jobs(_cluster(controllers, pki, operator), ids)), as_json)
    return ExitCode.OK


@program.command()
@cluster_options
@json_option
def ctrlstatus(controllers: str, pki: Path | None, operator: str, as_json: bool) -> int:
    """Ask each controller for its status. Exit code 4 if one does not answer."""
    from xce_supervisor.cli import jobs_view
    from xce_supervisor.testbed import client

    tls = operator_tls(pki, operator)
    answers: list[tuple[str, Any]] = []
    for address in split_list(controllers):
        try:
            answers.append((address, asyncio.run(client.ctrlstatus(address, tls))))
        except PeerError as error:
            answers.append((address, str(error)))
    if as_json:
        from xce_supervisor.cli import paper

        paper.put_json(
            [
                {"address": address, "error": said}
                if isinstance(said, str)
                else {"address": address, **msgspec.to_builtins(said)}
                for address, said in answers
            ]
        )
    else:
        jobs_view.put_controllers(answers)
    return ExitCode.CANNOT_TELL if any(isinstance(said, str) for _, said in answers) else ExitCode.OK


@program.command("step-down")
@cluster_options
@click.option("--hold-ms", type=click.IntRange(0), default=0, show_default=True, help="How long it does not campaign.")
@click.option("--at", "address", default="", metavar="HOST:PORT", help="This controller, if it leads. Default: whoever leads.")
def step_down(controllers: str, pki: Path | None, operator: str, hold_ms: int, address: str) -> int:
    """Make the primary give up leadership."""
    from xce_supervisor.testbed import client

    _ask(client.step_down(_cluster(controllers, pki, operator), address=address, hold_ms=hold_ms))
    click.echo("stepped down")
    return ExitCode.OK


@program.command()
@cluster_options
@click.argument("name", metavar="GATE")
@click.argument("turn", type=click.Choice(["close", "open"]))
@click.option("--at", "address", required=True, metavar="HOST:PORT", help="The controller whose gate it is.")
@click.option("--detail", default="", metavar="TEXT", help="Shown where the gate refuses.")
def gate(controllers: str, pki: Path | None, operator: str, name: str, turn: str, address: str, detail: str) -> int:
    """Close or open a promotion gate."""
    from xce_supervisor.testbed import client

    _ask(client.gate(address, operator_tls(pki, operator), name, closed=turn == "close", detail=detail))
    click.echo(f"gate {name} is {'closed' if turn == 'close' else 'open'}")
    return ExitCode.OK


def _cluster(controllers: str, pki: Path | None, operator: str) -> Cluster:
    from xce_supervisor.testbed.client import Cluster

    return Cluster(split_list(controllers), operator_tls(pki, operator))


def _ask(question: Coroutine[Any, Any, T]) -> T:
    """Run a request to its end; a refusal or silence becomes one line and the documented exit code."""
    try:
        return asyncio.run(question)
    except RequestRefused as error:
        raise _ended(ExitCode.REFUSED, f"refused: {error.text}") from error
    except (Redirected, DeadlinePassed) as error:
        raise _ended(ExitCode.CANNOT_TELL, str(error)) from error
    except PeerError as error:
        raise _ended(ExitCode.CANNOT_TELL, str(error)) from error


def _ended(code: ExitCode, text: str) -> click.exceptions.Exit:
    click.echo(f"xce-testbed: {text}", err=True)
    return click.exceptions.Exit(code)


def _log() -> None:
    """Processes log as one JSON object a line on standard error. Comes before all imports of a process: see `cli.slim`."""
    load_structlog_alone()
    from xce_supervisor.supervisor import logs

    logs.set_up("info", "json")


def main() -> None:
    """Entry of the console script."""
    enter(program, "xce-testbed")


if __name__ == "__main__":
    main()
