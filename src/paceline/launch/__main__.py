"""``python -m paceline.launch`` is ``paceline run``, for those who type ``torch.distributed.launch``."""

import sys

from paceline.__main__ import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
