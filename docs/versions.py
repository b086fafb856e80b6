"""Put a built site beside those of other versions: ``python docs/versions.py add SITE VERSION BUILT``.

SITE is the folder that a static host serves. It gets SITE/VERSION with the pages, SITE/versions.json with the list that
every page shows, and SITE/index.html, which leads to the newest release, or to "dev" where there is none.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

RELEASE = re.compile(r"\d+\.\d+\.\d+")
INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dpcore</title>
<meta http-equiv="refresh" content="0; url={version}/index.html"></head>
<body><a href="{version}/index.html">dpcore {version}</a></body></html>
"""


def ordered(names: set[str]) -> list[str]:
    """Releases from the newest on, then what is no release."""
    releases = sorted((name for name in names if RELEASE.fullmatch(name)), key=numbers, reverse=True)
    return [*releases, *sorted(names - set(releases))]


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def add(site: Path, version: str, built: Path) -> list[str]:
    """Copy the built pages and write the list; the versions that are there now."""
    if not (RELEASE.fullmatch(version) or version == "dev"):
        raise SystemExit(f"version={version!r}: must be a release such as 1.2.3, or 'dev'")
    if not (built / "index.html").is_file():
        raise SystemExit(
            f"built={str(built)!r}: must be a folder with a built site; `make docs` makes docs/_build/html"
        )
    if (site / version).exists():
        shutil.rmtree(site / version)
    shutil.copytree(built, site / version, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo*"))
    names = ordered({path.parent.name for path in site.glob("*/index.html")})
    (site / "versions.json").write_text(json.dumps(names) + "\n")
    (site / "index.html").write_text(INDEX.format(version=names[0]))
    return names


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["add"])
    parser.add_argument("site", type=Path)
    parser.add_argument("version")
    parser.add_argument("built", type=Path)
    given = parser.parse_args(arguments)
    print("\n".join(add(given.site, given.version, given.built)))


if __name__ == "__main__":
    main(sys.argv[1:])
