"""One figure of the table: the measured value, the reference and the target."""

from dataclasses import dataclass, field


@dataclass
class Figure:
    """A measured value. Less is always better."""

    row: str
    what: str
    value: float
    unit: str
    ours: str
    against: str
    limit: float | None = None
    reach: str = "–"
    # Differences below this are noise in a comparison of two runs.
    noise: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.row}: {self.what}"

    @property
    def reached(self) -> bool:
        return self.limit is None or self.value <= self.limit

    def verdict(self) -> str:
        if self.limit is None:
            return "–"
        if self.reached:
            return "yes"
        return f"**no**, {self.value / self.limit:.1f} × the target" if self.limit else f"**no**, {plain(self.value)} instead of 0"

    def shown(self) -> str:
        return f"{plain(self.value)} {self.unit}".strip()


@dataclass
class Measured:
    """The result of a row: figures for the table, and texts after it."""

    figures: list[Figure]
    texts: list[str] = field(default_factory=list)


def plain(number: float) -> str:
    """Formats three significant digits without an exponent."""
    if number == 0 or abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}" if abs(number) >= 0.1 else f"{number:.2g}"


def plural(count: float, noun: str) -> str:
    return f"{count:.0f} {noun}" + ("" if round(count) == 1 else "s")


def ms(seconds: float) -> str:
    return f"{plain(seconds * 1000)} ms" if seconds < 1 else f"{plain(seconds)} s"


def kib(count: float) -> str:
    return f"{plain(count / 1024)} KiB"


def mb(kibibytes: float) -> float:
    return kibibytes * 1024 / 1e6
