"""The agent on each GPU node, which removes the vendors' directories of deleted pods."""
