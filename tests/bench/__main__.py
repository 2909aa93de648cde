"""``make bench``: every measurement, one table each. Nothing is asserted; the figures are for a person to read."""

from __future__ import annotations

from tests.bench import creates, mutate, stale

if __name__ == "__main__":
    stale.main()
    print()
    mutate.main()
    print()
    creates.main()
