"""The agent on each GPU node. It removes the directories that a vendor's device plugin made for deleted pods."""
