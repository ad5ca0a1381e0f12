"""Figures in words: three digits that count, with their units."""


def digits(value: float) -> str:
    """Three digits that count, and thousands apart: 12,345, 123, 12.3, 1.23."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def plain(value: float) -> str:
    """A round number as it is: 0, 0.5, 20, 5,000."""
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value / 1e-6)} µs"


def milliseconds(value: float) -> str:
    return f"{digits(value * 1e3)} ms"


def power_of_seconds(value: float) -> str:
    """A power of ten: 10 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value / 1e-6:.4g} µs"


def size(num_bytes: float) -> str:
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= step:
            value = num_bytes / step
            return f"{value:.0f} {unit}" if value == round(value) else f"{digits(value)} {unit}"
    return f"{num_bytes:.0f} B"


def rate(bytes_per_s: float) -> str:
    unit, step = next((item for item in (("GB/s", 1e9), ("MB/s", 1e6)) if bytes_per_s >= item[1]), ("kB/s", 1e3))
    return f"{digits(bytes_per_s / step)} {unit}"


def times(value: float) -> str:
    """A factor in a sentence: 1.8, and 1.04 or 0.87 where one digit more tells on which side of 1 it is."""
    if value >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1.1 else f"{value:.2f}"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def several(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
