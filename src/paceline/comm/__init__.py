"""Process groups: shared memory within a host, messages between hosts, and what c10d asks of them."""
