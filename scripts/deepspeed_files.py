#!/usr/bin/env python3
"""Say which of DeepSpeed's configuration files of public projects run here unchanged, and why the
others do not.

    python scripts/deepspeed_files.py FOLDER            # a line for each, and the counts
    python scripts/deepspeed_files.py FOLDER --json     # the same for programs

FOLDER is the caller's: it holds the files of deepspeed_files.txt (a repository and a path a line),
as FOLDER/OWNER/NAME/PATH. None of them is part of this repository. Each is judged as
``initialize()`` judges it, "auto" filled in, by ``zeroshard config explain``'s own call.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from zeroshard.commands.config import explained
from zeroshard.errors import ConfigError

LIST = Path(__file__).with_name("deepspeed_files.txt")


def listed() -> list[tuple[str, str]]:
    """Return the repository and the path of each file."""
    lines = (line.partition("#")[0].split(None, 1) for line in LIST.read_text().splitlines())
    return [(line[0], line[1].strip()) for line in lines if len(line) == 2]


def refusals(path: Path) -> list[str]:
    """Return why a file does not run; an empty list where it does."""
    try:
        form, findings = explained(path)
    except ConfigError as error:
        return [str(error)]
    if form != "deepspeed":
        return ["it is no DeepSpeed configuration"]
    return [one.line for one in findings if one.verdict == "refused"]


def main() -> None:
    """Judge every file in the caller's folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found, missing = {}, []
    for repository, path in listed():
        file = arguments.folder / repository / path
        if file.is_file():
            found[f"{repository} {path}"] = refusals(file)
        else:
            missing.append(f"{repository} {path}")
    runs = sum(not why for why in found.values())
    by_project: dict[str, list[bool]] = {}
    for name, why in found.items():
        by_project.setdefault(name.partition(" ")[0], []).append(not why)
    if arguments.json:
        print(json.dumps({"runs": runs, "files": found, "missing": missing}))
        return
    for name, why in found.items():
        print(f"{'runs   ' if not why else 'refused'} {name}")
        for line in why:
            print(f"        {line}")
    for project, good in by_project.items():
        print(f"{sum(good):3} of {len(good):3} {project}")
    print(f"{runs} of {len(found)} files run unchanged; {len(missing)} of the list are not there")


if __name__ == "__main__":
    main()
