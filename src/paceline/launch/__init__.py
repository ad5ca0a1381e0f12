"""The launcher: N ranks of a script on this host, from one ``import torch``.

Three kinds of process, and each room file belongs to one of them. The *supervisor* (the command that the user typed:
``supervisor``, ``server``, ``output``, ``failure``) forwards output, passes signals on and reports. The *fork server*
(``forkserver``) imports torch once and forks. A *rank* (``rank``, ``program``) is a fork that becomes
``python script.py``.

The invariant: nothing survives the launcher, and the first failure is what it says last.
"""

from paceline.launch.spec import LaunchSpec
from paceline.launch.supervisor import launch

__all__ = ["LaunchSpec", "launch"]
