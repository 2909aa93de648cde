"""The agent on each GPU node. It removes directories that a vendor's device plugin made for deleted pods."""
