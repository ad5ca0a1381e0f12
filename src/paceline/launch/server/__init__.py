"""The fork server: imports torch once and forks stores, meetings and ranks; and the supervisor's handle on it."""
