"""The hosts of a job: how they find each other, and what place each has among all."""
