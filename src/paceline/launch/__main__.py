"""``python -m paceline.launch`` is ``paceline run``, for those who type ``torch.distributed.launch``."""

import sys

from paceline.cli import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
