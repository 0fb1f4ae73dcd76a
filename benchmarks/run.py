"""Runs a benchmark and keeps the tables that it prints: a JSON file for each machine and version.

    python benchmarks/run.py                         lists the benchmarks
    python benchmarks/run.py short_prompts [ARG …]   runs one, with arguments of its own

The file is benchmarks/results/MACHINE-VERSION.json; a benchmark that is run again takes the place
of its former tables. `make docs` makes the page "Results by machine" of these files.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import attnscope

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def machine() -> str:
    """The GPU, or the kind and number of processors."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def tables(printed: str) -> list[dict[str, Any]]:
    """The Markdown tables in what a benchmark printed."""
    found: list[dict[str, Any]] = []
    lines = [line.strip() for line in printed.splitlines()] + [""]
    for before, line, after in zip(["", *lines], lines, lines[1:], strict=False):
        if re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", after):
            found.append({"columns": cells(line), "rows": []})
        elif line.startswith("|") and before.startswith("|") and "---" not in line and found:
            found[-1]["rows"].append(cells(line))
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def keep(name: str, arguments: list[str], printed: str) -> Path:
    """Write the tables into the file of this machine and version."""
    slug = re.sub(r"\W+", "-", machine()).strip("-").lower()
    path = RESULTS / f"{slug}-{attnscope.__version__}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"benchmarks": {}}
    kept |= {"machine": machine(), "attnscope": attnscope.__version__}
    kept["benchmarks"][name] = {
        "arguments": arguments,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load": round(os.getloadavg()[0], 1),
        "tables": tables(printed),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def main() -> None:
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem != "run")
    name, *arguments = sys.argv[1:] or [""]
    if name not in names:
        sys.exit(f"python benchmarks/run.py NAME [ARG …]; known: {', '.join(names)}")
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}.py ended with exit code {done.returncode}; nothing is kept")
    print(f"{done.stdout}\nkept in {keep(name, arguments, done.stdout)}")


if __name__ == "__main__":
    main()
