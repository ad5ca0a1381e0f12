"""Backwards, and the gradients that they leave."""


def grads(module):
    """Of parameters of one element each; None where there is none."""
    return [None if p.grad is None else p.grad.item() for p in module.parameters()]


def step(wrapped, loss, times=1):
    """Gradients after each of ``times`` fresh backwards."""
    seen = []
    for _ in range(times):
        wrapped.zero_grad()
        loss().backward()
        seen.append(grads(wrapped))
    return seen
