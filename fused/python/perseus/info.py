# SPDX-License-Identifier: Apache-2.0
"""python -m perseus.info [--json]: what is installed, and whether it can run here. Exit status: 0 if it can, 1 if
something is missing."""
from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

import perseus

from ._command import Parser


def devices() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p = torch.cuda.get_device_properties(index)
        peers = [other for other in range(torch.cuda.device_count())
                 if other != index and torch.cuda.can_device_access_peer(index, other)]
        found.append({"index": index, "name": p.name, "capability": f"{p.major}.{p.minor}",
                      "usable": (p.major, p.minor) == (9, 0), "reaches": peers})
    return found


def gather() -> dict[str, Any]:
    facts: dict[str, Any] = {"package": perseus.__version__, "torch": torch.__version__, "cuda": torch.version.cuda,
                             "devices": devices(), "problems": []}
    problems = facts["problems"]
    try:
        library = perseus.library()
        facts.update(library=library.path, version=library.prs_fused_version().decode(), emulated=library.emulated)
        if facts["version"] != perseus.__version__:
            problems.append(f"the library is version {facts['version']} and the package {perseus.__version__}: install "
                            "both from the same build")
        if not library.emulated and not any(d["usable"] for d in facts["devices"]):
            problems.append("no Hopper GPU (compute capability 9.0) is visible: "
                            "PERSEUS_FUSED_LIBRARY=emulated runs without")
        for d in facts["devices"] if not library.emulated else []:
            if d["usable"] and len(facts["devices"]) > 1 and not d["reaches"]:
                problems.append(f"GPU {d['index']} reaches no other GPU's memory: ranks of this node cannot work "
                                "together")
    except perseus.PerseusError as e:
        problems.append(str(e))
    try:
        facts["plugin"] = perseus.plugin_path()
    except perseus.PerseusError:
        facts["plugin"] = None
    facts["variables"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith("PERSEUS_")}
    return facts


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m perseus.info", description="What is installed, and whether it can run here.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    facts = gather()
    if options.json:
        parser.say(json.dumps(facts))
        return 1 if facts["problems"] else 0
    parser.say(f"package   {facts['package']}")
    parser.say(f"library   {facts.get('library', 'none')}"
               f"{' (emulator of Hopper GPUs)' if facts.get('emulated') else ''}")
    parser.say(f"torch     {facts['torch']}, CUDA {facts['cuda']}")
    parser.say(f"plugin    {facts['plugin'] or 'not in this installation'}")
    for d in facts["devices"]:
        parser.say(f"GPU {d['index']}     {d['name']}, {d['capability']}"
                   f"{'' if d['usable'] else ' (not Hopper: not used)'}, reaches {d['reaches']}")
    for name, value in facts["variables"].items():
        parser.say(f"variable  {name}={value}")
    for problem in facts["problems"]:
        parser.say(f"problem   {problem}")
    return 1 if facts["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
