"""Which parameter server holds which parameters: neighbouring ones, about equally many numbers each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paceline.errors import ConfigError


def divide(sizes: Sequence[int], servers: int) -> tuple[range, ...]:
    """Cut a list of parameters into one range a server, at least one parameter in each.

    A parameter is never cut: an optimizer looks at one as a whole.

    Args:
        sizes: the numbers in each parameter.
        servers: how many servers.

    Raises:
        ConfigError: there are fewer parameters than servers.
    """
    if len(sizes) < servers:
        raise ConfigError(
            f"--servers {servers}, but the model has {len(sizes)} trainable parameters, and each server "
            f"needs one. Use --servers {len(sizes)} or fewer."
        )
    sums = [0, *itertools.accumulate(sizes)]
    cuts = [0]
    for server in range(1, servers):
        wanted = server * sums[-1] / servers
        possible = range(cuts[-1] + 1, len(sizes) - (servers - server) + 1)
        cuts.append(min(possible, key=lambda cut: abs(sums[cut] - wanted)))
    return tuple(itertools.starmap(range, itertools.pairwise([*cuts, len(sizes)])))
