"""The agent on each GPU node: it removes the directories that vendors made for pods that are gone."""
