"""The launcher: N ranks of a script on this host, from one ``import torch``.

Three kinds of process, and each folder belongs to one of them. The *supervisor* (the command that the user typed:
``supervisor``, ``lives``, ``failures``, ``output``, ``hangs``) forwards output, passes signals on and reports. The
*fork server* (``server``) imports torch once and forks. A *rank* (``ranks``) is a fork that becomes
``python script.py``. Where there are several hosts, each with a launcher, a process of ``hosts`` meets the others; or
one command, the *conductor* (``conductor``), has an *agent* (``agent``) on each, which is its supervisor.

The invariant: nothing survives the launcher, and the first failure is what it says last.
"""

__all__: list[str] = []  # each is imported from where it is: a command must not wait for what it does not use
