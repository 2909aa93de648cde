"""``make reference``: writes docs/reference.md."""

from __future__ import annotations

from tools.reference.page import PATH, render

if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
