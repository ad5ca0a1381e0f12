"""Every exception that paceline raises, so that a caller can tell causes apart without reading messages.

    PacelineError
    ├── EnvironmentVariableError  ValueError    a launcher's variable is missing, is no number or contradicts another
    ├── WorldError                RuntimeError  init, shutdown or use of a world out of order
    ├── RendezvousError           TimeoutError  the ranks did not meet before the deadline
    ├── BarrierTimeoutError       TimeoutError  ranks did not reach a barrier before the deadline
    ├── PeerError                 RuntimeError  another rank failed or died while this one waited for it
    ├── CommunicationError        RuntimeError  a process group cannot be made or used here
    ├── CollectiveMismatchError   RuntimeError  the ranks called different collectives, or with different sizes
    ├── CollectiveTimeoutError    TimeoutError  a collective was not done before its deadline (a RuntimeError too)
    ├── PlanError                 ValueError    a plan was asked for that cannot be made
    ├── ReplicaMismatchError      RuntimeError  the ranks built, froze or replaced parameters differently
    ├── ReductionError            RuntimeError  gradients could not be averaged
    ├── DataError                 ValueError    a sampler, loader or gather was given what does not fit together
    ├── ReplicaError              RuntimeError  a replica's error that cannot be raised anew; or nothing to train
    ├── PipelineError             RuntimeError  a pipeline cannot run as it was built or called
    ├── AmpError                  RuntimeError  amp was called out of order or with unfit options (a ValueError too)
    ├── LossScaleError            RuntimeError  gradients go on overflowing, and the loss scale is at its floor
    ├── CheckpointError           RuntimeError  a checkpoint can be neither written nor read, nor gone on from
    │   ├── CheckpointDamagedError RuntimeError a file is not as it was written
    │   └── CheckpointMissingError RuntimeError there is no such file (a FileNotFoundError too)
    ├── LaunchError               RuntimeError  the ranks could not be started
    ├── ObserverError             RuntimeError  an observer raised; the round that it observed has ended all the same
    ├── TimelineError             ValueError    events or traces were to be kept or merged in a way that cannot be
    └── BenchError                ValueError    a bench was asked for that cannot be run, or a file holds none

Each also subclasses the built-in error that torch raises in the same place, so ``except RuntimeError`` in an old
script still catches it. A message says what was expected, what came, on which rank, and what to do next.
"""


class PacelineError(Exception):
    """The root: catches everything that paceline raises on its own account."""


class EnvironmentVariableError(PacelineError, ValueError):
    """A launcher's environment variable is missing, is not a number, or contradicts another one."""


class WorldError(PacelineError, RuntimeError):
    """``init``, ``shutdown`` or the use of a world came out of order, or asked for what this machine lacks."""


class RendezvousError(PacelineError, TimeoutError):
    """The ranks did not all meet before the deadline."""


class BarrierTimeoutError(PacelineError, TimeoutError):
    """Some ranks did not reach a barrier before the deadline; the message names them."""


class PeerError(PacelineError, RuntimeError):
    """Another rank failed or died while this one waited for it; the message names it and gives its traceback."""


class PlanError(PacelineError, ValueError):
    """A plan was asked for that cannot be made."""


class ReplicaMismatchError(PacelineError, RuntimeError):
    """The ranks built, froze or replaced parameters differently; the message names the first difference."""


class ReductionError(PacelineError, RuntimeError):
    """The gradients of a step could not be averaged over the ranks."""


class DataError(PacelineError, ValueError):
    """A sampler, a loader or a gather was given arguments that do not fit together."""


class ReplicaError(PacelineError, RuntimeError):
    """A replica of a DataParallel raised what cannot be raised anew with its number, or none has anything to train."""


class PipelineError(PacelineError, RuntimeError):
    """A pipeline cannot run as it was built or called, or its tied weights have parted."""


class AmpError(PacelineError, RuntimeError, ValueError):
    """A call of amp came out of order, or with options that do not fit; Apex raises now the one, now the other."""


class LossScaleError(PacelineError, RuntimeError):
    """Gradients go on overflowing although the loss scale is at its floor; the message names the parameters."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint could not be written, read or gone on from; the message names the file."""


class CheckpointDamagedError(CheckpointError):
    """A file is not as it was written; the message names it, and the newest good one."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no such file."""


class LaunchError(PacelineError, RuntimeError):
    """The launcher could not start the ranks."""


class CommunicationError(PacelineError, RuntimeError):
    """A process group cannot be made or used here: what it needs is missing, or it was closed or given up."""


class CollectiveMismatchError(PacelineError, RuntimeError):
    """The ranks called different collectives, or one with different sizes, dtypes or roots; the message names both."""


class CollectiveTimeoutError(PacelineError, TimeoutError, RuntimeError):
    """A collective was not done before its deadline; the message names the ranks that have not come."""


class ObserverError(PacelineError, RuntimeError):
    """An observer of a reducer raised. The round had been brought to its end first: gradients are averages."""


class TimelineError(PacelineError, ValueError):
    """A timeline or a trace was to be kept or merged in a way that cannot be."""


class BenchError(PacelineError, ValueError):
    """A bench cannot be run as asked, what it is to measure is no model and batch, or a file holds no bench."""
