"""Commands: python -m zero_torch --cmake-dir | --info."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import _abi

# For CMAKE_PREFIX_PATH, as torch.utils.cmake_prefix_path.
CMAKE_DIR = Path(__file__).resolve().parent / "share" / "cmake"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m zero_torch", description="About the installed package."
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the folder for CMAKE_PREFIX_PATH, where find_package(Zero) finds the library",
    )
    choice.add_argument(
        "--info", action="store_true", help="print the versions that a bug report should name"
    )
    options = parser.parse_args(arguments)
    if options.cmake_dir:
        print(CMAKE_DIR)
    else:
        for name, value in _abi.info().items():
            print(f"{name}: {value or 'none'}")


if __name__ == "__main__":
    main()
