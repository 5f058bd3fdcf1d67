"""`python -m xce_supervisor`: the same program as `xce-supervisor`."""

from __future__ import annotations

from xce_supervisor.cli.supervisor import main

if __name__ == "__main__":
    main()
