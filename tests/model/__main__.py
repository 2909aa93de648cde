"""Explores the model of the ledger: `python -m tests.model [--full] [--broken RULE]`."""

import argparse
import sys
from collections.abc import Mapping

from tests.model.cases import FULL, MUTANTS, SMALL
from tests.model.explore import Explored, explore
from tests.model.world import Bounds

REST_EVERY = 200


def main() -> int:
    """Explore the model with the correct rules, and with each rule that is wrong on purpose. Print the results.

    Return 1 if the correct rules lead to a violation, or if a wrong rule leads to none.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.model", description="explore the model of the ledger")
    parser.add_argument("--full", action="store_true", help="within large bounds too (half an hour, 2 GB)")
    parser.add_argument("--broken", metavar="RULE", help="only show how this broken rule admits too much")
    asked = parser.parse_args()
    if asked.broken:
        return show_broken(asked.broken)
    found = explore_all(FULL if asked.full else SMALL)
    survivors = [each.broken for each in MUTANTS if not explore(each.broken_bounds, each.rest_every).fault]
    print(f"{len(MUTANTS)} broken rules, {len(MUTANTS) - len(survivors)} found out", *survivors, sep=", not: ")
    return 1 if survivors or any(each.fault for each in found) else 0


def explore_all(cases: Mapping[str, Bounds]) -> list[Explored]:
    found = []
    print(f"{'states':>10}{'transitions':>13}{'seconds':>9}  bounds")
    for title, bounds in cases.items():
        result = explore(bounds, REST_EVERY)
        found.append(result)
        print(f"{result.states:>10,}{result.transitions:>13,}{result.seconds:>9.1f}  {title}", flush=True)
        if result.fault:
            show(result)
    print(f"{sum(each.states for each in found):>10,} states in {sum(each.seconds for each in found):.0f} s")
    return found


def show_broken(rule: str) -> int:
    mutant = next((each for each in MUTANTS if each.broken == rule), None)
    if mutant is None:
        print("must be one of:", *(each.broken for each in MUTANTS), sep="\n  ")
        return 2
    result = explore(mutant.broken_bounds, mutant.rest_every)
    show(result)
    return 1 if result.fault else 0


def show(result: Explored) -> None:
    for number, step in enumerate(result.trace, 1):
        print(f"{number:>4}  {step}")
    print(f"      {result.fault or 'nothing is wrong'}")


if __name__ == "__main__":
    sys.exit(main())
