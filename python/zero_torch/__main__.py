"""Commands: python -m zero_torch --cmake-dir | --info | consolidate | inspect."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import _abi, _commands

# For CMAKE_PREFIX_PATH, as torch.utils.cmake_prefix_path.
CMAKE_DIR = Path(__file__).resolve().parent / "share" / "cmake"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m zero_torch", description="About the installed package, and checkpoints."
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the folder for CMAKE_PREFIX_PATH, where find_package(Zero) finds the library",
    )
    choice.add_argument(
        "--info", action="store_true", help="print the versions that a bug report should name"
    )
    _commands.add_to(parser.add_subparsers(title="commands", dest="command"))
    options = parser.parse_args(arguments)
    if sum((options.cmake_dir, options.info, options.command is not None)) != 1:
        parser.error("expected one of --cmake-dir, --info, consolidate and inspect")
    if options.cmake_dir:
        print(CMAKE_DIR)
    elif options.info:
        for name, value in _abi.info().items():
            print(f"{name}: {value or 'none'}")
    else:
        try:
            status = int(options.run(options))
            sys.stdout.flush()
            return status
        except BrokenPipeError:  # of `inspect DIR | head`, whose reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
