"""``make bench``: every measurement, one table each. Nothing is asserted; the figures are for a person to read."""

from __future__ import annotations

from tests.bench import creates, extender, mutate, stale, sweep

if __name__ == "__main__":
    stale.main()
    print()
    sweep.main()
    print()
    mutate.main()
    print()
    extender.main()
    print()
    creates.main()
