"""Small datasets."""


class Numbers:
    """A dataset of the numbers below a size."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index
