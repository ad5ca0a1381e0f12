"""How far two trainings ended up apart: the largest difference of a parameter, relative to its tensor's largest value.

python examples/compare.py two.pt one.pt
"""

import sys

import torch

ours, theirs = (torch.load(path, weights_only=True) for path in sys.argv[1:3])
worst = max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)
verdict = "equal up to rounding" if worst < 1e-4 else "they differ"
print(f"largest relative difference of the final parameters: {worst:.1e} ({verdict})")
sys.exit(worst >= 1e-4)
