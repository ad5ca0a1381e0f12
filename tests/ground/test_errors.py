"""Callers may catch paceline's errors by its own tree or by torch's habits."""

import inspect

import pytest

from paceline import errors

BUILT_IN = {
    "EnvironmentVariableError": ValueError,
    "WorldError": RuntimeError,
    "RendezvousError": TimeoutError,
    "BarrierTimeoutError": TimeoutError,
    "PeerError": RuntimeError,
    "CommunicationError": RuntimeError,
    "CollectiveMismatchError": RuntimeError,
    "CollectiveTimeoutError": TimeoutError,
    "PlanError": ValueError,
    "ReplicaMismatchError": RuntimeError,
    "ReductionError": RuntimeError,
    "DataError": ValueError,
    "ReplicaError": RuntimeError,
    "PipelineError": RuntimeError,
    "AmpError": RuntimeError,
    "LossScaleError": RuntimeError,
    "CheckpointError": RuntimeError,
    "CheckpointDamagedError": RuntimeError,
    "CheckpointMissingError": RuntimeError,
    "LaunchError": RuntimeError,
    "ObserverError": RuntimeError,
    "TimelineError": ValueError,
    "BenchError": ValueError,
}


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN.items())
def test_each_error_is_ours_and_the_built_in_that_the_tree_promises(name, built_in):
    error = getattr(errors, name)
    assert issubclass(error, errors.PacelineError)
    assert issubclass(error, built_in)
    # As what torch's backends, and Apex, raise it too.
    also = {"CollectiveTimeoutError": {RuntimeError}, "AmpError": {ValueError}}.get(name, set())
    assert {c for c in (ValueError, RuntimeError, TimeoutError) if issubclass(error, c)} == {built_in} | also


def test_the_table_above_is_complete():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes == {"PacelineError", *BUILT_IN}


def test_each_error_stands_in_the_tree_of_the_docstring_with_its_built_in():
    for name, built_in in BUILT_IN.items():
        (line,) = [line for line in errors.__doc__.splitlines() if line.lstrip(" │├└─").startswith(f"{name} ")]
        assert line.split(name)[1].split()[0] == built_in.__name__


def test_the_root_is_no_built_in_but_exception():
    assert errors.PacelineError.__bases__ == (Exception,)
