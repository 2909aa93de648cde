"""The agent on each GPU node. For deleted pods, it removes the directories that a vendor's device plugin has made."""
