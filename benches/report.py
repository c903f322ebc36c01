"""The table and the document around it."""

import lab
from figures import Measured

HEADS = ["row", "what", "ours", "against", "ratio or figure", "to reach", "reached"]


def table(found: dict[str, Measured], failed: dict[str, str]) -> str:
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for row in found.values():
        for figure in row.figures:
            cells = [figure.row, figure.what, figure.ours, figure.against, figure.shown(), figure.reach, figure.verdict()]
            lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| {name} | – | not measured: {why} | | | | **no** |" for name, why in failed.items()]
    return "\n".join(lines)


def document(found: dict[str, Measured], failed: dict[str, str], head: str) -> str:
    figures = [figure for row in found.values() for figure in row.figures if figure.limit is not None]
    unreached = [figure.key for figure in figures if not figure.reached]
    missed = unreached + list(failed)
    lines = [
        "# Measured",
        "",
        "Written by `python3 benches/run.py`; run it to get your own. All on one machine in one run, against the same S3 server (SeaweedFS on",
        "loopback), with the same transcripts (`benches/transcripts.py`: the line shapes of Claude Code, which gzip makes 4.6 times smaller).",
        "What is set against a bare request or the limit of the machine is measured in turns with it; times are medians unless they say",
        "otherwise. Less is better everywhere.",
        "",
        head,
        "",
        f"{len(figures) - len(unreached)} of {len(figures)} are reached." + (f" Missed: {'; '.join(missed)}." if missed else ""),
        "",
        table(found, failed),
    ]
    for name, row in found.items():
        note = lab.HERE / f"notes/{name}.md"
        if row.texts or note.exists():
            lines += ["", f"## {name.capitalize()}", "", "\n\n".join(row.texts)]
        if note.exists():
            lines += ["", "What the profile showed:", "", note.read_text().strip()]
    _, _, how = (lab.HERE / "README.md").read_text().partition("\n## ")
    return "\n".join([*lines, "", f"## {how.strip()}"]) + "\n"
