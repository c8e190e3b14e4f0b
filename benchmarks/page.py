"""Makes pages of the JSON that benchmarks wrote.

    python benchmarks/page.py benchmarks/results/DATE [--docs docs/performance.md]

Writes README.md into the folder of results: every table, with the machine, the versions and the
commands. With --docs it also puts tables into a page, between lines

    <!-- table: NAME -->    and    <!-- end -->

where NAME is a table's name, or "about" for the machine; what the folder has no table for stays as
it is, and results of --quick runs are left out. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from machine import words_of
from results import Table

Document = dict[str, Any]
_BLOCK = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def documents(folder: Path) -> list[Document]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def about(document: Document) -> str:
    machine, versions = document["machine"], document["versions"]
    vector = ", ".join(machine["vector"]) or "no AVX2"
    return (
        f"{machine['processor']}, {machine['cores']} cores ({vector}), "
        f"{machine['memory_gib']} GiB, {machine['system']}, "
        f"transparent huge pages: {machine['huge_pages']}; torch {versions['torch']}, "
        f"Python {versions['python']}, Zero at {versions['commit']}; {document['date'][:10]}."
    )


def block_of(table: dict[str, Any], document: Document) -> str:
    """A table as it stands in a page."""
    caption = f"{table['caption']}. {words_of(document['quiet'])} `{command_of(document)}`"
    return f"{caption}\n\n{Table(**table).markdown()}\n"


def command_of(document: Document) -> str:
    """Without the folders of the machine that it ran on."""
    words = document["command"].split()
    words = [f"benchmarks/{Path(word).name}" if word.endswith(".py") else word for word in words]
    if "--results" in words:
        place = words.index("--results")
        del words[place : place + 2]
    return " ".join(words)


def results_page(folder: Path) -> str:
    found = documents(folder)
    parts = [f"# Benchmarks, {folder.name}\n"]
    parts += [f"{text}\n" for text in dict.fromkeys(about(document) for document in found)]
    for document in found:
        parts.append(f"## {document['benchmark']}\n")
        parts += [block_of(table, document) for table in document["tables"]]
        if (folder / f"{document['benchmark']}.svg").is_file():
            name = document["benchmark"]
            parts.append(f"![{name}]({name}.svg)\n")
    return "\n".join(parts)


def write_page(folder: Path) -> Path:
    path = folder / "README.md"
    path.write_text(results_page(folder))
    return path


def fill(text: str, found: list[Document]) -> tuple[str, list[str]]:
    """The page with its tables, and the names that nothing was found for."""
    found = [document for document in found if not document["settings"].get("quick")]
    blocks = {
        table["name"]: block_of(table, document)
        for document in found
        for table in document["tables"]
    }
    if found:
        blocks["about"] = "\n".join(dict.fromkeys(about(document) for document in found)) + "\n"
    missing = [name for _, name, _ in _BLOCK.findall(text) if name not in blocks]

    def replace(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return begin + blocks[name] + end if name in blocks else match[0]

    return _BLOCK.sub(replace, text), missing


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--docs", type=Path, nargs="*", default=[], help="pages to fill")
    options = parser.parse_args()
    found = documents(options.results)
    if not found:
        sys.exit(f"expected results (*.json) in {options.results}, found none")
    print(write_page(options.results))
    for path in options.docs:
        text, missing = fill(path.read_text(), found)
        path.write_text(text)
        print(f"{path}{': nothing for ' + ', '.join(missing) if missing else ''}")


if __name__ == "__main__":
    main()
