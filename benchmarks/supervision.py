#!/usr/bin/env python3
"""Measures the supervisor side by side with its peers and with a floor in C, as ratios inside one run.

    python benchmarks/supervision.py --harness DIR [--parts restart,grace,burst,idle] [--peers ref-c,erlang-otp,...] [--json]

DIR holds the harness of process supervisors (bench_supervisors.py and what it builds; its README says how to set it up). It is
copied, ours is added to it by benchmarks/peer_adapter.py, and what it measured is held against the goals below. The numbers
come from the harness's own clocks and pidfds; nothing that we say of ourselves is used. Run as root, on a calm machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FLOOR = "ref-c"
OURS = "xce-supervisor"
PEERS = ("erlang-otp", "daemontools", "runit", "systemd", "s6", "supervisord", "pm2", "circus", "circus-fast")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--harness", required=True, type=Path, help="folder with bench_supervisors.py")
    parser.add_argument("--parts", default="restart,grace,burst,idle")
    parser.add_argument("--peers", default="", help="default: the floors, ours, and every peer that is installed")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not (args.harness / "bench_supervisors.py").exists():
        parser.error(f"{args.harness} has no bench_supervisors.py")
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(prefix="xce-bench-") as folder:
        harness = Path(folder) / "harness"
        shutil.copytree(args.harness, harness)
        for path in harness.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        shutil.copy(here / "peer_adapter.py", harness / "adapters" / "xce_supervisor.py")
        out = Path(folder) / "out"
        command = [sys.executable, str(harness / "bench_supervisors.py"), "--quick", "--only", args.parts]
        command += ["--out", str(out), "--seed", args.seed, "--tag", "run"]
        if args.peers:
            command += ["--peers", args.peers]
        env = {**os.environ, "XCE_BENCH_PYTHON": sys.executable, "PYTHONPATH": str(here.parent)}
        done = subprocess.run(command, env=env, stdout=sys.stderr, check=False)
        if done.returncode != 0:
            print("the harness failed; what it said is above", file=sys.stderr)
            return done.returncode
        found = next(out.glob("*.json"))
        measured = json.loads(found.read_text(encoding="utf-8"))
    figures = judge(measured["records"])
    if args.json:
        print(json.dumps({"meta": measured["meta"], "figures": figures}, indent=2))
    else:
        show(measured["meta"], figures)
    return 0


def judge(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each figure: ours, the floor's, the best peer's, the ratios, and whether the goal is met."""
    values = {(record["peer"], record["metric"]): record["value"] for record in records if record["value"] is not None}
    figures = []
    for variant in (OURS, f"{OURS}-groups"):
        for metric, over_floor, over_best, what in (
            ("restart_p50", 2.5, 1.25, "crash of a ready child to its successor's exec, median"),
            ("grace_overshoot_p50", 2.0, None, "overshoot of a 1 s grace with a deaf child, median"),
            (
                "grace_overshoot_max",
                None,
                None,
                "overshoot of a 1 s grace with a deaf child, worst (goal: 10 ms on a calm machine)",
            ),
            ("start100_first_to_last", 3.0, None, "start of 100 children, first to last exec"),
            ("mass100_all_restarted", 2.0, None, "100 killed at once, all back"),
            ("mass100_zombies_left", None, None, "zombies left after that (goal: 0)"),
            ("shutdown100", None, None, "shutdown of 100"),
            ("idle1_rss", None, None, "resident KiB with one child (goal: 45 MiB = 46080)"),
            ("idle1_cpu_per_min", None, None, "cpu ms a minute, one child, four status polls a second (goal: 0.5 % = 300)"),
            ("idle1_wakeups_per_min", None, None, "wake-ups a minute, the same (four polls a second are 240)"),
        ):
            ours = values.get((variant, metric))
            if ours is None:
                continue
            floor = values.get((FLOOR, metric))
            peers = [(values[name, metric], name) for name in PEERS if (name, metric) in values]
            best = min(peers) if peers else None
            to_floor = ours / floor if floor else None
            to_best = ours / best[0] if best and best[0] else None
            goals = [to_floor <= over_floor for _ in "x" if over_floor and to_floor is not None]
            goals += [to_best <= over_best for _ in "x" if over_best and to_best is not None]
            figures.append(
                {
                    "who": variant,
                    "metric": metric,
                    "what": what,
                    "ours": ours,
                    "floor": floor,
                    "to_floor": to_floor,
                    "goal_to_floor": over_floor,
                    "best_peer": best[1] if best else None,
                    "to_best_peer": to_best,
                    "goal_to_best_peer": over_best,
                    "met": all(goals) if goals else None,
                }
            )
    return figures


def show(meta: dict[str, Any], figures: list[dict[str, Any]]) -> None:
    """Print a table for people."""
    print(f"machine busy {meta['busy_pct']} %, kernel {meta['kernel']}, Python {meta['python']}, {meta['cpus']} cores")
    for figure in figures:
        ratio = f"{figure['to_floor']:.2f} x floor" if figure["to_floor"] is not None else ""
        goal = f" (goal {figure['goal_to_floor']})" if figure["goal_to_floor"] else ""
        best = f", {figure['to_best_peer']:.2f} x {figure['best_peer']}" if figure["to_best_peer"] is not None else ""
        met = {True: "met", False: "MISSED", None: ""}[figure["met"]]
        print(f"{figure['who']:24s} {figure['metric']:24s} {figure['ours']:10.2f}  {ratio}{goal}{best}  {met}   {figure['what']}")


if __name__ == "__main__":
    sys.exit(main())
