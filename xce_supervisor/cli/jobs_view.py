"""How jobs and controllers of the reference cluster are printed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from xce_supervisor.cli import paper
from xce_supervisor.cli.paper import BAD, DOUBT, GOOD, PLAIN, QUIET, STRONG, Cell, Table
from xce_supervisor.cli.words import span
from xce_supervisor.wire.words import CtrlStatusReply, JobView

_STYLES = {"done": GOOD, "failed": BAD, "running": STRONG, "dispatched": DOUBT, "pending": PLAIN}


def put_ids(ids: Sequence[str], as_json: bool) -> None:
    """Print job ids, one a line."""
    if as_json:
        paper.put_json({"job_ids": list(ids)})
    else:
        paper.put([((job_id, PLAIN),) for job_id in ids])


def put(jobs: Sequence[JobView], as_json: bool) -> None:
    """Print jobs."""
    if as_json:
        paper.put_json({"jobs": jobs})
        return
    if not jobs:
        paper.put([(("No jobs.", QUIET),)])
        return
    rows = tuple(
        (
            (job.job_id, PLAIN),
            (job.state, _STYLES.get(job.state, PLAIN)),
            (str(job.attempt), PLAIN),
            (job.worker or "-", PLAIN),
            ("-" if job.exit_code is None else str(job.exit_code), BAD if job.exit_code else PLAIN),
            (shlex.join(job.command) + (f"  ({job.reason})" if job.reason else ""), PLAIN),
        )
        for job in jobs
    )
    paper.put([Table(heads=("JOB", "STATE", "ATTEMPT", "WORKER", "EXIT", "COMMAND"), rows=rows)])


def put_controllers(answers: Sequence[tuple[str, CtrlStatusReply | str]]) -> None:
    """Print what each controller said, or why it said nothing."""
    rows: list[tuple[Cell, ...]] = []
    for address, said in answers:
        if isinstance(said, str):
            rows.append(((address, PLAIN), ("-", PLAIN), ("no answer", BAD), *((("-", PLAIN),) * 4), (said, DOUBT)))
            continue
        session = said.scheduler
        joined = "-" if session is None or not session.joined else f"{session.name} {span(session.since_ms / 1000)}"
        quorum = "-" if said.quorum_age_ms is None else span(said.quorum_age_ms / 1000)
        remark = f"refused by {said.gate}: {said.gate_detail}" if said.gate else ""
        if said.role != "primary" and said.primary_address:
            remark = remark or f"primary is {said.primary_id} at {said.primary_address}"
        if said.role == "primary":
            remark = (
                f"{said.jobs_pending} pending, {said.jobs_running} running, {said.jobs_finished} finished; {said.workers} workers"
            )
        rows.append(
            (
                (address, PLAIN),
                (said.controller_id, STRONG),
                (said.role, GOOD if said.role == "primary" else PLAIN),
                (str(said.term), PLAIN),
                (quorum, PLAIN),
                (str(said.commit_index), PLAIN),
                (joined, PLAIN),
                (remark, PLAIN),
            )
        )
    heads = ("ADDRESS", "ID", "ROLE", "TERM", "QUORUM", "INDEX", "SCHEDULER", "")
    paper.put([Table(heads=heads, rows=tuple(rows))])
