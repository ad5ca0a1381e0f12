"""Cutting a model into stages, at the borders of its blocks.

A Sequential is cut between its children. Of any other model the forward is traced with torch.fx, its blocks left
whole, and cut before blocks; what a later stage needs, skip connections included, travels through those between. A
stage takes one value and returns one; the first takes the model's arguments.

The invariant: the stages, one after the other, compute what the model computes, with the model's own parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import fx
from torch.nn import Module, ModuleList, Sequential

from paceline.errors import PlanError
from paceline.pipeline.tracing import Example, Tracing, is_left_whole


class Model(Protocol):
    """Something that can be cut.

    Attributes:
        units: names of what is never cut, in order.
    """

    units: list[str]

    def stage(self, units: range) -> Module:
        """The module that computes these units."""

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments with which these stages would not compute what the model does."""


class Row:
    """A Sequential, with Sequentials in it flattened."""

    def __init__(self, module: Sequential) -> None:
        self._children = list(_flat(module, ""))
        self.units = [name for name, _ in self._children]

    def stage(self, units: range) -> Module:
        return Sequential(*(self._children[unit][1] for unit in units))

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Its first child takes what it takes."""


def _flat(module: Sequential, prefix: str) -> Iterator[tuple[str, Module]]:
    for name, child in module._modules.items():  # ``named_children`` leaves out what comes again, such as one ReLU
        assert child is not None
        if type(child) is Sequential and len(child) > 0 and not has_hooks(child) and "forward" not in vars(child):
            yield from _flat(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def has_hooks(module: Module) -> bool:
    """Whether calling it does more than its ``forward``."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


class Traced:
    """Any model whose forward torch.fx can follow with its blocks left whole.

    Args:
        starts: names of the modules before whose call it may be cut, besides the end of the last of them; by default
            the members of its largest ModuleList or Sequential.
        example: of its arguments; by default those that have no default.
    Raises:
        PlanError: there are no blocks, it cannot be traced, or a block is not called once.
    """

    def __init__(self, module: Module, starts: Sequence[str] | None = None, example: Example | None = None) -> None:
        blocks = list(starts) if starts is not None else _blocks_of(module)
        followed = [part for name, part in module.named_modules() if not is_left_whole(name, blocks)]
        before = [part.training for part in followed]
        self._tracing = Tracing(module, blocks, example)
        self._graphs: dict[bool, tuple[fx.Graph, dict[fx.Node, int]]] = {}
        try:
            for mode in (True, False):  # what forward does with `self.training` is fixed when it is traced
                for part in followed:
                    part.training = mode
                graph = self._tracing.graph()
                self._graphs[mode] = graph, _units_of(graph, blocks, ends_last=starts is None)
        finally:
            for part, mode in zip(followed, before, strict=True):
                part.training = mode
        self._module = module
        self.units = ["(before)", *blocks, *(["(after)"] if starts is None else [])]

    def stage(self, units: range) -> Module:
        modes = {mode: _part_of(self._module, graph, of, units) for mode, (graph, of) in self._graphs.items()}
        if modes[True].code == modes[False].code:
            return modes[True]
        return _ByMode(modes[True], modes[False], self._module.training)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._tracing.check(args, kwargs)


class _ByMode(Module):
    """A part that computes something else in evaluation."""

    def __init__(self, in_training: Module, in_evaluation: Module, mode: bool) -> None:
        super().__init__()
        self.in_training = in_training
        self.in_evaluation = in_evaluation
        self.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.in_training if self.training else self.in_evaluation)(*args, **kwargs)


def _units_of(graph: fx.Graph, blocks: Sequence[str], *, ends_last: bool) -> dict[fx.Node, int]:
    """To which unit each node belongs: 0 is what comes before the first block."""
    calls = {
        name: [node for node in graph.nodes if node.op == "call_module" and node.target == name] for name in blocks
    }
    for name, found in calls.items():
        if len(found) != 1:
            raise PlanError(
                f"{name!r} is called {len(found)} times in forward; a model is cut before modules that are called once."
            )
    starts = [calls[name][0] for name in blocks]
    units: dict[fx.Node, int] = {}
    unit = 0
    for node in graph.nodes:
        if unit < len(starts) and node is starts[unit]:
            unit += 1
        elif any(node is start for start in starts):
            raise PlanError(f"{node.target!r} is called out of the order {', '.join(map(repr, blocks))}.")
        units[node] = unit
        if ends_last and unit == len(starts) and node is starts[-1]:
            unit += 1
    return units


def _blocks_of(module: Module) -> list[str]:
    """The members of the list that holds most parameters."""
    lists = [(name, part) for name, part in module.named_modules() if isinstance(part, (ModuleList, Sequential))]
    lists = [(name, part) for name, part in lists if len(part) > 1]
    if not lists:
        raise PlanError(
            f"{type(module).__name__} has no ModuleList or Sequential of blocks to be cut between. Give the names of "
            "modules (balance=[...]), or a list of stages."
        )
    name, found = max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))
    return [f"{name}.{number}" if name else number for number in found._modules]


def _part_of(root: Module, graph: fx.Graph, unit_of: dict[fx.Node, int], units: range) -> fx.GraphModule:
    """The nodes of these units as a module from what comes in to what goes out."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    if units.start > 0:
        received = part.placeholder("received")
        for index, node in enumerate(_alive(graph, unit_of, units.start)):
            copies[node] = part.call_function(_item, (received, index))

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter or buffer, read where it is needed
            copies[node] = part.node_copy(node)
        return copies[node]

    for node in graph.nodes:
        if unit_of[node] in units and node.op not in ("get_attr", "output"):
            for needed in node.all_input_nodes:
                copied(needed)
            copies[node] = part.node_copy(node, copied)
    output = next(node for node in graph.nodes if node.op == "output")
    if unit_of[output] in units:
        for needed in output.all_input_nodes:
            copied(needed)
        part.output(fx.map_arg(output.args[0], copied))
    else:
        part.output(tuple(copies[node] for node in _alive(graph, unit_of, units.stop)))
    part.lint()
    return fx.GraphModule(root, part)


def _item(received: Sequence[Any], index: int) -> Any:
    return received[index]


def _alive(graph: fx.Graph, unit_of: dict[fx.Node, int], border: int) -> list[fx.Node]:
    """What is made before the unit ``border`` and needed from it on, in the order in which it is made."""
    return [
        node
        for node in graph.nodes
        if node.op != "get_attr" and unit_of[node] < border and any(unit_of[user] >= border for user in node.users)
    ]
