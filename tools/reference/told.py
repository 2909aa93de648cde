"""The sections of docs/reference.md with messages, and with advice for users who get these messages."""

from __future__ import annotations

from typing import NamedTuple

from tools.reference.markdown import code, table


class Told(NamedTuple):
    """One message in docs/reference.md. ``todo``: what users should do; empty if the message itself says it."""

    message: str
    todo: str = ""


class Chapter(NamedTuple):
    """A section of docs/reference.md with messages. ``how``: a paragraph about where these messages are shown."""

    title: str
    how: str
    messages: tuple[Told, ...]

    def section(self) -> str:
        if any(told.todo for told in self.messages):
            told = table(("message", "what to do"), [(code(told.message), told.todo) for told in self.messages])
        else:
            told = "\n".join(f"- {code(told.message)}" for told in self.messages)
        return f"### {self.title}\n\n{self.how}\n\n{told}"
