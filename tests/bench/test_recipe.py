"""Functions that make what is measured: those that are found, and what is said of all others."""

import sys

import pytest
import torch
from torch import nn

from paceline.bench.models import BUILT_IN
from paceline.bench.recipe import Recipe
from paceline.errors import BenchError
from support.commands import write_script

CPU = torch.device("cpu")
EXPECTED = "expected (model, (inputs, target)), and if you like a loss and an optimizer behind them"


@pytest.fixture(autouse=True)
def imports_leave_no_trace(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    made = [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", None))]
    for name in made:
        del sys.modules[name]


def made(folder, source, name="train.py", **options):
    """What a file's ``make`` comes to."""
    header = "import torch\nfrom torch import nn\n"
    path = write_script(folder, header + source, name)
    return Recipe(f"{path}:make", **options).make(CPU)


def refusal(folder, source, **options):
    with pytest.raises(BenchError) as caught:
        made(folder, source, **options)
    return str(caught.value).replace(f"--model {folder}/train.py:make: ", "").replace(f"{folder}/", "")


NET = "def make():\n    return nn.Linear(3, 2), (torch.zeros(5, 3), {target}){rest}\n"


@pytest.mark.parametrize(
    ("name", "num_parameters", "batch_size"), [("mnist", 1_199_882, 32), ("unet", 467_169, 4), ("gpt", 10_893_568, 2)]
)
def test_built_in_models_have_these_sizes_and_a_loss_to_train_with(name, num_parameters, batch_size):
    training = Recipe(name).make(CPU)
    assert sum(param.numel() for param in training.model.parameters()) == num_parameters
    assert training.batch_size == batch_size
    single = Recipe(name, batch_size=1).make(CPU)
    assert single.batch_size == 1
    loss = single.loss_of(single.call(single.model))
    loss.backward()
    assert all(param.grad is not None for param in single.model.parameters())


def test_without_a_loss_integers_want_cross_entropy_and_others_the_mean_square(tmp_path):
    integers = made(tmp_path, NET.format(target="torch.ones(5, dtype=torch.long)", rest=""))
    assert integers.loss is nn.functional.cross_entropy
    floats = made(tmp_path, NET.format(target="torch.ones(5, 2)", rest=""))
    output = torch.full((5, 2), 3.0, requires_grad=True)
    assert floats.loss_of(output).item() == 4.0
    assert isinstance(floats.optimizer, torch.optim.SGD)


def test_inputs_may_be_named_and_the_loss_and_the_optimizer_ones_own(tmp_path):
    training = made(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
    def forward(self, a, b):
        return {"loss": (self.w * a * b).sum()}
def make(batch_size=4):
    net = Net()
    inputs = {"a": torch.full((batch_size,), 3.0), "b": torch.tensor(5.0)}
    return net, (inputs, None), lambda output, _: output["loss"], torch.optim.Adam(net.parameters())
""",
        batch_size=2,
    )
    assert training.batch_size == 2
    assert training.loss_of(training.call(training.model)).item() == 2 * 2.0 * 3.0 * 5.0
    assert isinstance(training.optimizer, torch.optim.Adam)
    training.widen(3)
    assert training.batch_size == 6
    assert training.inputs["b"].item() == 5.0  # no batch


def test_each_call_makes_the_same_model(tmp_path):
    source = NET.format(target="torch.ones(5, 2)", rest="")
    one, other = made(tmp_path, source), made(tmp_path, source)
    assert torch.equal(one.model.weight, other.model.weight)


def test_a_file_finds_what_lies_beside_it_and_may_bear_the_name_of_a_module_that_is_loaded(tmp_path):
    write_script(tmp_path, "SIZE = 7\n", "beside_it.py")
    source = "from beside_it import SIZE\n" + NET.format(target="torch.zeros(5, 7)", rest="").replace("3, 2", "3, SIZE")
    assert made(tmp_path, source, name="random.py").model.out_features == 7
    assert sys.modules["random"].randint  # the one of old


def test_a_module_is_looked_for_in_the_working_folder_too(tmp_path, monkeypatch):
    write_script(
        tmp_path,
        "import torch\n" + NET.format(target="torch.ones(5, 2)", rest="").replace("nn.", "torch.nn."),
        "my_net.py",
    )
    monkeypatch.chdir(tmp_path)
    assert Recipe("my_net:make").make(CPU).batch_size == 5


def test_a_name_that_is_none_is_refused_with_what_may_be_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model, message in {
        "resnet": "--model resnet: expected mnist, unet, gpt, FILE.py:FUNCTION or MODULE:FUNCTION",
        "train.py": "--model train.py: expected mnist, unet, gpt, FILE.py:FUNCTION or MODULE:FUNCTION; did you mean "
        "train.py:make?",
        "train.py:make()": "--model train.py:make(): expected mnist, unet, gpt, FILE.py:FUNCTION or MODULE:FUNCTION",
        "train.py:make": f"--model train.py:make: no such file: 'train.py' (looked in {tmp_path})",
    }.items():
        with pytest.raises(BenchError) as caught:
            Recipe(model)
        assert str(caught.value) == message


def test_a_module_that_cannot_be_imported_is_named_with_the_line(tmp_path):
    said = refusal(tmp_path, "1 / 0\n")
    assert said == "train.py cannot be imported: ZeroDivisionError: division by zero (train.py, line 3)"
    said = refusal(tmp_path, "def make(:\n")
    assert said == "train.py cannot be imported: SyntaxError: invalid syntax (train.py, line 3)"
    with pytest.raises(BenchError, match=r"^--model no_such:make: no_such cannot be imported: ModuleNotFoundError: "):
        Recipe("no_such:make").make(CPU)


def test_a_function_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    assert (
        refusal(tmp_path, "make = 3\ndef build(): ...\ndef _own(): ...\n")
        == "train.py has no function 'make'; it has build"
    )
    assert refusal(tmp_path, "") == "train.py has no function 'make'; it has none"


def test_a_function_that_wants_what_nobody_gives_is_refused(tmp_path):
    expected = "which nobody gives it; expected a function without arguments, or with batch_size alone, which"
    expected += " --batch-size sets"
    assert refusal(tmp_path, "def make(args): ...\n") == f"it needs args, {expected}"
    assert refusal(tmp_path, "def make(batch_size): ...\n") == f"it needs batch_size, {expected}"
    with pytest.raises(BenchError) as caught:
        made(tmp_path, "def make(): ...\n", batch_size=8)
    assert str(caught.value) == (
        f"--batch-size 8: {tmp_path}/train.py:make takes no argument batch_size. Give it one, or leave the option out"
    )


def test_a_function_that_raises_is_quoted_with_the_line(tmp_path):
    assert refusal(tmp_path, "def make():\n    return [][1]\n") == (
        "it raised IndexError: list index out of range (train.py, line 4)"
    )


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("nn.Linear(3, 2)", f"it returned a value of type Linear; {EXPECTED}"),
        ("()", f"it returned 0 values; {EXPECTED}"),
        ("(1, 2, 3, 4, 5)", f"it returned 5 values; {EXPECTED}"),
        ("3, (torch.zeros(5), None)", f"its first value, of type int, is no torch.nn.Module; {EXPECTED}"),
        (
            "nn.Linear(3, 2), torch.zeros(5)",
            f"its second value, of type Tensor, is no pair (inputs, target); {EXPECTED}",
        ),
        (
            "nn.Linear(3, 2), (1, 2, 3)",
            f"its second value, of type tuple of 3, is no pair (inputs, target); {EXPECTED}",
        ),
        ("nn.ReLU(), (torch.zeros(5), None)", "its model has no parameter to train"),
        (
            "nn.Linear(3, 2), (torch.tensor(1.0), None)",
            "its inputs, of type Tensor, hold no tensor whose first dimension is the batch",
        ),
        (
            "nn.Linear(3, 2), (torch.zeros(5, 3), None)",
            "for its target, of type NoneType, there is no loss; return one as the third value",
        ),
        (
            "nn.Linear(3, 2), (torch.zeros(5, 3), None), 'mse'",
            f"its third value, of type str, is no loss(output, target); {EXPECTED}",
        ),
        (
            "nn.Linear(3, 2), (torch.zeros(5, 3), torch.zeros(5, 2)), None, 0.1",
            f"its fourth value, of type float, is no torch.optim.Optimizer; {EXPECTED}",
        ),
    ],
)
def test_what_is_no_model_and_batch_is_refused(tmp_path, returned, message):
    assert refusal(tmp_path, f"def make():\n    return {returned}\n") == message


@pytest.mark.parametrize(
    ("loss", "got"),
    [("output", "a tensor of shape (5, 2)"), ("1.0", "of type float"), ("torch.ones(())", "a tensor of shape ()")],
)
def test_a_loss_that_cannot_be_trained_with_is_refused(tmp_path, loss, got):
    training = made(tmp_path, NET.format(target="None", rest=f", lambda output, target: {loss}"))
    with pytest.raises(BenchError) as caught:
        training.loss_of(training.call(training.model))
    assert str(caught.value) == f"the loss is {got}; expected a tensor of one element that depends on the parameters"


def test_built_in_models_are_those_that_the_messages_name():
    assert list(BUILT_IN) == ["mnist", "unet", "gpt"]
