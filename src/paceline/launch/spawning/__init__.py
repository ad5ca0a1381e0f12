"""``paceline.spawn``: a function instead of a script on every rank."""
