"""The size of the released program, without symbols."""

import shutil
import subprocess

from figures import Figure, Measured, plain


def measure(bench) -> Measured:
    with bench.directory("size") as directory:
        bare = directory / "bare"
        if shutil.which("strip"):
            subprocess.run(["strip", "-o", bare, bench.program], check=True)
        else:
            shutil.copy(bench.program, bare)
        stripped, plain_size = bare.stat().st_size / 1e6, bench.program.stat().st_size / 1e6
    return Measured([Figure("size", "stripped binary", stripped, "MB", f"{plain(stripped)} MB", f"{plain(plain_size)} MB as built")])
