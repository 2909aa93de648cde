"""Messages, with what to do about each. The code itself produces the messages when it is run for an example."""

from __future__ import annotations

from typing import NamedTuple

from tools.reference.markdown import code, table


class Told(NamedTuple):
    """One message, and what to do. The second is empty if the message already says it."""

    message: str
    todo: str = ""


class Chapter(NamedTuple):
    """Messages that reach people in the same way."""

    title: str
    how: str
    messages: tuple[Told, ...]

    def section(self) -> str:
        """Return the chapter in Markdown."""
        if any(told.todo for told in self.messages):
            told = table(("message", "what to do"), [(code(told.message), told.todo) for told in self.messages])
        else:
            told = "\n".join(f"- {code(told.message)}" for told in self.messages)
        return f"### {self.title}\n\n{self.how}\n\n{told}"
