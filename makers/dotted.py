"""`package.module:name`: how users name their own classes and functions.

Guarantees: a path that cannot be resolved ends in a ValueError that says which part is wrong (module, import, name) and
what is near; `check_dotted` finds that out in a process of its own, so the caller's interpreter stays as it is.
Run as `python -m makers.dotted PATH` it prints the error, if any, and exits 1.
"""

from __future__ import annotations

import difflib
import importlib
import os
import subprocess
import sys
import traceback
from typing import Any

TRACEBACK_CHARACTERS = 1500


def load_dotted(path: str) -> Any:
    """The object that `package.module:name` names. Raises ValueError."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{path}: write it as package.module:name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(
                f"{path}: there is no module {error.name!r} in {os.getcwd()} or anywhere on the import path; "
                "install it, or put its folder on PYTHONPATH"
            ) from None
        raise ValueError(f"{path}: importing {module_name!r} failed\n{short_traceback(error)}") from error
    except (Exception, SystemExit) as error:  # a script without a __main__ guard may exit when it is imported
        raise ValueError(f"{path}: importing {module_name!r} failed\n{short_traceback(error)}") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"{path}: module {module_name!r} ({module.__file__}) has no {name!r}{hint}")
    return getattr(module, name)


def short_traceback(error: BaseException, frames: int = 4) -> str:
    """The innermost `frames` frames and the message, bounded in length."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-frames)).rstrip()
    return text if len(text) <= TRACEBACK_CHARACTERS else f"...{text[-TRACEBACK_CHARACTERS:]}"


def child_environment() -> dict[str, str]:
    """The environment in which a child interpreter (started with -P) finds the modules that this one finds.

    The working folder comes last on the path: a `tandem` command does not have it by itself, and users keep
    their functions there.
    """
    paths = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*paths, os.getcwd()]))}


def check_dotted(path: str, timeout: float = 60.0) -> None:
    """Raise ValueError if `path` does not name a callable; looked up in a child interpreter within `timeout` seconds."""
    command = [sys.executable, "-P", "-m", "makers.dotted", path]
    try:
        done = subprocess.run(
            command,
            check=False,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{path}: importing it took longer than {timeout:g} s") from None
    if done.returncode != 0:
        raise ValueError(done.stderr.strip() or f"{path}: importing it ended the interpreter ({done.returncode})")


def _main(path: str) -> int:
    try:
        target = load_dotted(path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not callable(target):
        print(f"{path}: is {type(target).__name__}, a class or a function is needed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
