"""How each program begins and ends: exit codes, closed pipes, Ctrl-C, and errors as one line without a traceback.

The exit codes are listed in docs/operating.md. Everything an operator got wrong (arguments, configuration) is EX_CONFIG, so
that a service manager can be told never to retry it (systemd: RestartPreventExitStatus=78).
"""

from __future__ import annotations

import io
import os
import sys
from enum import IntEnum
from typing import NoReturn

import click
from click.shell_completion import shell_complete

from xce_supervisor.cli.paper import OutputFailed
from xce_supervisor.errors import ConfigError


class ExitCode(IntEnum):
    """What a verb's exit code says. docs/operating.md has the same table."""

    OK = 0
    DEGRADED = 1  # `status`, `why`, `check`: something is not as wanted
    NOT_RUNNING = 3  # no supervisor has the socket
    CANNOT_TELL = 4  # a supervisor is there and does not answer; the last state is shown with its age
    REFUSED = 5  # the supervisor answered no (unknown unit, not allowed)
    OUTPUT = 74  # standard output cannot be written
    LOCK_LOST = 75  # another supervisor watches this controller (docs/rules.md S16)
    CONFIG = 78  # arguments or configuration cannot be used
    INTERRUPTED = 130
    PIPE_CLOSED = 141


def enter(command: click.Command, program: str) -> NoReturn:
    """Run `command` on the process's arguments and exit. Never returns, never prints a traceback for what others did wrong."""
    if not __debug__:
        print(f"{program}: refused: run Python without -O (its invariants are checked after every step)", file=sys.stderr)
        sys.exit(ExitCode.CONFIG)
    sys.exit(_run(command, program))


def _run(command: click.Command, program: str) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a letter is no reason to fail
    try:
        result = _invoke(command, program)
        sys.stdout.flush()
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        print(f"{path}: {error.format_message()} (try '{path} --help')", file=sys.stderr)
        return ExitCode.CONFIG
    except click.ClickException as error:
        print(f"{program}: {error.format_message()}", file=sys.stderr)
        return ExitCode.CONFIG
    except ConfigError as error:
        print("\n".join(f"{program}: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return ExitCode.CONFIG
    except OutputFailed as error:
        print(f"{program}: {error}", file=sys.stderr)
        return ExitCode.OUTPUT
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more at exit; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PIPE_CLOSED
    return result if isinstance(result, int) else ExitCode.OK


def _invoke(command: click.Command, program: str) -> object:
    """Run the command. Not by `command.main`, which has answers of its own to a closed pipe and to Ctrl-C."""
    completing = f"_{program.replace('-', '_').upper()}_COMPLETE"
    if completing in os.environ:
        return shell_complete(command, {}, program, completing, os.environ[completing])
    with command.make_context(program, sys.argv[1:]) as context:
        return command.invoke(context)
