"""The table and the document around it."""

import lab
from figures import Measured

HEADS = ["row", "measurement", "sessiond", "compared with", "ratio or value", "target", "met"]


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
        "# Benchmarks",
        "",
        "`python3 benches/run.py` generates this page. Run it to measure your own machine. All figures come from one",
        "run on one machine, against the same S3 server (SeaweedFS on loopback), with the same transcripts",
        "(`benches/transcripts.py`: lines like those of Claude Code, which gzip compresses 4.6 times). Each",
        "comparison with a bare request or with the limit of the machine alternates between the two measurements.",
        "Times are medians unless stated otherwise. Lower is better in every row.",
        "",
        head,
        "",
        f"{len(figures) - len(unreached)} of {len(figures)} targets are met." + (f" Missed: {'; '.join(missed)}." if missed else ""),
        "",
        table(found, failed),
    ]
    for name, row in found.items():
        note = lab.HERE / f"notes/{name}.md"
        if row.texts or note.exists():
            lines += ["", f"## {name.capitalize()}", "", "\n\n".join(row.texts)]
        if note.exists():
            lines += ["", "From the profile:", "", note.read_text().strip()]
    _, _, how = (lab.HERE / "README.md").read_text().partition("\n## ")
    return "\n".join([*lines, "", f"## {how.strip()}"]) + "\n"
