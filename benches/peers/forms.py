"""How rows fall on experts: plain counts, the same in every run."""

import dataclasses
import random
from collections.abc import Sequence

SEED = 1
SKEWED = ("log-normal", "one hot", "third empty", "ragged")


@dataclasses.dataclass(frozen=True)
class Line:
    """Rows of every expert, and what they are called."""

    form: str
    mean: int
    counts: list[int]


def even(num_experts: int, mean: int) -> Line:
    return Line("even", mean, [mean] * num_experts)


def skewed(form: str, num_experts: int, mean: int) -> Line:
    """`num_experts * mean` rows: log-normal with sigma 1; half of them on one expert; none on every third; or from none to
    twice the mean, which no tile divides."""
    rng = random.Random(SEED)
    weights = {
        "log-normal": lambda expert: rng.lognormvariate(0, 1),
        "one hot": lambda expert: num_experts - 1 if expert == num_experts // 2 else 1,
        "third empty": lambda expert: 0 if expert % 3 == 2 else 1,
        "ragged": lambda expert: rng.random(),
    }[form]
    return Line(form, mean, shared_out(num_experts * mean, [weights(expert) for expert in range(num_experts)]))


def shared_out(num_rows: int, weights: Sequence[float]) -> list[int]:
    """Rows in proportion to weights; what rounding leaves goes to the largest remainders."""
    exact = [num_rows * weight / sum(weights) for weight in weights]
    counts = [int(rows) for rows in exact]
    by_remainder = sorted(range(len(weights)), key=lambda expert: counts[expert] - exact[expert])
    for expert in by_remainder[: num_rows - sum(counts)]:
        counts[expert] += 1
    return counts
