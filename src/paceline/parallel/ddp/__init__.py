"""``DistributedDataParallel``, torch's wrapper: its arguments, its copies, and what it does around a reducer."""
