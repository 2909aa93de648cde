"""The measured values of a benchmark that creates pods: their medians over several rounds, and their output."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from bench import load
from vcuda.cli import aligned

PROCESSES = ("kube-apiserver", "etcd", "webhook", "controller")
"""The programs whose CPU time is measured. The program "webhook" includes all replicas with their workers."""


class Case(NamedTuple):
    """A case to measure: an arrangement (a way to admit pods), and the number of namespaces that its pods are in."""

    arrangement: str
    namespaces: int


class Figures(msgspec.Struct, frozen=True):
    """The measured values of one load (a period in which clients create pods as fast as they can).

    ``cpu_ms_per_pod``: CPU milliseconds per stored pod, of all `PROCESSES` together.
    ``pods_per_second``: stored pods per second.
    ``p50_ms``, ``p99_ms``: percentiles of the latency of a create in milliseconds.
    ``rejected``: number of rejected creates.
    ``by_process``: CPU milliseconds per stored pod, for each of `PROCESSES`.
    ``releasing``: number of rejected creates whose answer says that quota is being released.
    """

    cpu_ms_per_pod: float
    pods_per_second: float
    p50_ms: float
    p99_ms: float
    rejected: int
    by_process: Mapping[str, float]
    releasing: int = 0


Results = Mapping[Case, Sequence[Figures]]
"""The measured values of each round, by case. The output lists the cases in the same order."""


def figures_of(result: load.Result, cpu_seconds: Mapping[str, float]) -> Figures:
    """Return the measured values of a load.

    ``cpu_seconds``: the CPU seconds by program. A program that is missing here has used 0 s.
    """
    by_process = {name: cpu_seconds.get(name, 0.0) * 1000 / result.wanted for name in PROCESSES}
    cpu_ms = sum(by_process.values())
    return Figures(cpu_ms, result.rate, result.p50, result.p99, result.rejected, by_process, result.releasing)


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each value over the rounds. Rejections are added up, so that even one rejection is visible.

    The median for each program is computed separately. So these medians may not add up to ``cpu_ms_per_pod``.
    """

    def median(values: Iterator[float]) -> float:
        return round(statistics.median(values), 3)

    return Figures(
        median(one.cpu_ms_per_pod for one in rounds),
        median(one.pods_per_second for one in rounds),
        median(one.p50_ms for one in rounds),
        median(one.p99_ms for one in rounds),
        sum(one.rejected for one in rounds),
        {name: median(one.by_process[name] for one in rounds) for name in PROCESSES},
        sum(one.releasing for one in rounds),
    )


def as_json(results: Results) -> str:
    """Return the medians in JSON: ``{arrangement: {number of namespaces: figures}}``."""
    report: dict[str, dict[str, Figures]] = {}
    for case, rounds in results.items():
        report.setdefault(case.arrangement, {})[str(case.namespaces)] = medians(rounds)
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def as_table(results: Results) -> str:
    heading = (
        "creates of pods",
        "namespaces",
        "CPU ms/pod",
        *PROCESSES,
        "pods/s",
        "p50 ms",
        "p99 ms",
        "rejected",
        "releasing",
    )
    return "\n".join(aligned([heading, *(_line(case, medians(rounds)) for case, rounds in results.items())]))


def _line(case: Case, median: Figures) -> tuple[str, ...]:
    by_process = (f"{median.by_process[name]:.2f}" if median.by_process[name] else "-" for name in PROCESSES)
    times = (f"{median.p50_ms:.1f}", f"{median.p99_ms:.1f}", str(median.rejected), str(median.releasing))
    cost = (f"{median.cpu_ms_per_pod:.2f}", *by_process, f"{median.pods_per_second:.0f}")
    return (case.arrangement, str(case.namespaces), *cost, *times)
