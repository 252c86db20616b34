"""One reading of a server's metrics page: sums over engines, settings, and periods between two.

Reads Prometheus's text format and refuses pages that are not Octavo's. Nothing is judged here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from octavo.errors import RequestError

_OURS, _VLLM = "octavo:engine_up", "vllm:"
_SETTINGS = "octavo:config_info"

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """samples: of each name, its series in the order of the page."""

    samples: Mapping[str, tuple[tuple[Labels, float], ...]]

    @classmethod
    def parse(cls, text: str, where: str) -> "Reading":
        """Raises RequestError, which says where the page is from, for any other page."""
        found: dict[str, list[tuple[Labels, float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append((sample.labels, sample.value))
        except (ValueError, KeyError, IndexError):
            found = {}
        if not found:
            raise RequestError(f"{where} is not a metrics page in Prometheus's text format")
        if _OURS not in found:
            vllm = any(name.startswith(_VLLM) for name in found)
            whose = "of vLLM" if vllm else "of another program"
            raise RequestError(
                f"{where} has metrics {whose}: {_OURS} is missing, so this is no Octavo server"
            )
        return cls({name: tuple(series) for name, series in found.items()})

    def values(self, name: str, **labels: str) -> Iterator[float]:
        """Of each series with these labels: of each engine, where they have series of their own."""
        for found, value in self.samples.get(name, ()):
            if labels.items() <= found.items():
                yield value

    def total(self, name: str, **labels: str) -> float:
        return sum(self.values(name, **labels))

    def most(self, name: str) -> float:
        """The engine's that has most."""
        return max(self.values(name), default=0.0)

    def setting(self, name: str) -> str:
        """Of the configuration; "" where it is not set, or the server is too old to say."""
        for labels, _ in self.samples.get(_SETTINGS, ()):
            return labels.get(name, "")
        return ""

    def number(self, name: str) -> float | None:
        """The setting as a number; None where it is not set, or is none."""
        try:
            return float(self.setting(name))
        except ValueError:
            return None

    @property
    def model(self) -> str:
        labels, _ = self.samples[_OURS][0]
        return labels.get("model_name", "")


@dataclass(frozen=True, slots=True)
class Period:
    """What was counted from one reading to another; without a first one since the start."""

    start: Reading | None
    end: Reading
    words: str  # when that was, for evidence

    def count(self, name: str, **labels: str) -> float:
        """0 where a counter fell: the server was started again."""
        before = self.start.total(name, **labels) if self.start else 0.0
        return max(0.0, self.end.total(name, **labels) - before)

    def mean(self, histogram: str) -> float:
        count = self.count(f"{histogram}_count")
        return self.count(f"{histogram}_sum") / count if count else 0.0

    def percentile(self, histogram: str, share: float) -> float:
        """As Prometheus's histogram_quantile: linear within a bucket; 0 without samples."""
        name = f"{histogram}_bucket"
        bounds = sorted({labels["le"] for labels, _ in self.end.samples.get(name, ())}, key=float)
        counts = [(float(bound), self.count(name, le=bound)) for bound in bounds]
        wanted = share * counts[-1][1] if counts else 0.0
        low, below = 0.0, 0.0
        for bound, count in counts:
            if count >= wanted > 0:
                if bound == float("inf"):
                    return low
                return low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return 0.0
