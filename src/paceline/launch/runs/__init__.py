"""What runs on this host and what dead launchers have left on it, and the end of the latter."""
