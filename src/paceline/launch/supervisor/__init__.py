"""The launcher's own process: one life of the ranks after another, and who is told."""
