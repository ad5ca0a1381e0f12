"""What examples import, and torch's optimizers: once, before ranks are forked, since it takes seconds."""

import importlib
import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    before = dict(os.environ)
    for name in ("sklearn.datasets", "torch._dynamo"):
        importlib.import_module(name)
    for name in set(os.environ) - set(before):  # scikit-learn's, for libraries that it does not have here
        del os.environ[name]
