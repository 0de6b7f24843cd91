"""What the aliases of a YAML file stand for: a few lines of them are more than any memory holds."""

import yaml

LEAST = 100_000  # letters and values that a file may always stand for
TIMES = 10  # else this often its own length


def bomb(data: bytes) -> str | None:
    """Return the fault of a file whose aliases stand for far more than it holds, None of others.

    >>> bomb(b"a: &a [1, 2]\\nb: [*a, *a]")
    >>> bomb(b"a: &a [*a]")
    'its aliases (*name) stand for more than 100,100 values'
    """
    most, count = LEAST + TIMES * len(data), 0
    try:
        waiting = [yaml.compose(data, Loader=yaml.SafeLoader)]
    except (yaml.YAMLError, RecursionError):  # whoever reads it says so
        return None
    while waiting:
        node = waiting.pop()
        pairs = isinstance(node, yaml.MappingNode)
        inside = [] if node is None or isinstance(node, yaml.ScalarNode) else node.value
        waiting += [child for pair in inside for child in pair] if pairs else inside
        count += len(inside) or len(node.value if node else "")
        if count > most:
            return f"its aliases (*name) stand for more than {most:,} values"
    return None
