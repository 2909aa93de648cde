"""The agent on each GPU node. It deletes directories that a vendor's device plugin made for deleted pods."""
