"""Where the ranks are: asked of them when the launcher is, or when they wait for too long."""
