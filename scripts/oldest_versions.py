"""Prints pip constraints: the oldest version of each dependency that pyproject.toml allows.

python -m scripts.oldest_versions > constraints.txt
"""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main() -> None:
    """Prints `name==version; marker` for each requirement `name[extra]>=version; marker`."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    for line in (line for lines in lists for line in lines):
        if stated := re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)[^;]*(;.*)?", line):
            print(f"{stated[1]}=={stated[2]}{stated[3] or ''}")


if __name__ == "__main__":
    main()
