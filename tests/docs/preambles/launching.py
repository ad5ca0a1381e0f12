import paceline

world = paceline.init()
first, num_steps = 0, 3
model = optimizer = None


def train(model, optimizer, step): ...


def save(model, optimizer, step): ...
