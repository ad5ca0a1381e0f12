"""The command that runs a job on several hosts from one terminal, and its lines to their agents."""
