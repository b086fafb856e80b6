"""Count lines of Python by room, at two revisions: ``python tests/count_lines.py 2f01860 HEAD``.

Code, docstrings, comments and blank lines are told apart as cloc does; the last columns are what changed.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter

KINDS = ("code", "docstring", "comment", "blank")
ROOTS = ("dpcore", "backends", "tests", "asv_benchmarks")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def kinds(source: str) -> Counter[str]:
    """Return how many lines of each kind a file has."""
    lines = source.splitlines()
    found = dict.fromkeys(range(1, len(lines) + 1), "blank")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not lines[token.start[0] - 1][: token.start[1]].strip():
            found[token.start[0]] = "comment"
        elif token.string.strip() and token.type not in (tokenize.COMMENT, tokenize.ENDMARKER):
            found.update(dict.fromkeys(range(token.start[0], token.end[0] + 1), "code"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            found.update(dict.fromkeys(range(text.lineno, (text.end_lineno or text.lineno) + 1), "docstring"))
    return Counter(found.values())


def rooms(revision: str) -> dict[str, Counter[str]]:
    """Return the counts by room: the first two names of a file's path."""
    total: dict[str, Counter[str]] = {}
    for path in git("ls-tree", "-r", "--name-only", revision, *ROOTS).split():
        if path.endswith(".py"):
            parts = path.split("/")
            counts = kinds(git("show", f"{revision}:{path}")) + Counter(files=1)
            for room in (parts[0], "/".join(parts[:2]) + ("/" if len(parts) > 2 else "")):
                total.setdefault(room, Counter()).update(counts)
    return total


def main(before: str, after: str) -> None:
    """Print the table."""
    old, new = rooms(before), rooms(after)
    print(
        f"{'room':34}{'files':>12}{'lines ' + before[:7]:>15}{'lines ' + after[:7]:>15}{'change':>9}{'code only':>11}"
    )
    for room in sorted(old.keys() | new.keys()):
        a, b = (counts.get(room, Counter()) for counts in (old, new))
        lines = [sum(one[kind] for kind in KINDS) for one in (a, b)]
        files = f"{a['files']} -> {b['files']}"
        print(f"{room:34}{files:>12}{lines[0]:15}{lines[1]:15}{lines[1] - lines[0]:+9}{b['code'] - a['code']:+11}")


if __name__ == "__main__":
    main(*(sys.argv[1:] if len(sys.argv) == 3 else ("2f01860", "HEAD")))
