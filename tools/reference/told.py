"""What people are told, and what they can do about it: the words come from the code, which is run for each."""

from __future__ import annotations

from typing import NamedTuple

from tools.reference.markdown import code, table


class Told(NamedTuple):
    """One message, and what to do; nothing where the message says it."""

    message: str
    todo: str = ""


class Chapter(NamedTuple):
    """Messages that reach people in one way."""

    title: str
    how: str
    messages: tuple[Told, ...]

    def section(self) -> str:
        """Return it in Markdown."""
        if any(told.todo for told in self.messages):
            told = table(("message", "what to do"), [(code(told.message), told.todo) for told in self.messages])
        else:
            told = "\n".join(f"- {code(told.message)}" for told in self.messages)
        return f"### {self.title}\n\n{self.how}\n\n{told}"
