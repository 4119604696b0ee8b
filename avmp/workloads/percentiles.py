"""Percentile tables of recorded request lengths: figures computed from public traces, not the traces.

Sampling interpolates linearly between neighbouring percentiles. That keeps every percentile, and overstates the long
tail between the last two: the mean of the samples lies above the recorded one, by 10 % for ShareGPT prompts, 3 % for
Azure prompts and under 1 % for Azure outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from avmp.errors import InvalidArgument
from avmp.workloads.trace import IntArray


@dataclass(frozen=True)
class PercentileTable:
    """``values[p]`` is the p-th percentile, 0 to 100, of the lengths of ``requests`` recorded requests."""

    source: str
    licence: str
    requests: int
    values: tuple[int, ...]

    def sample(self, requests: int, rng: np.random.Generator) -> IntArray:
        """Lengths drawn by inverse transform: a uniform position in the table, interpolated linearly, rounded."""
        positions = rng.random(requests) * 100
        return np.rint(np.interp(positions, np.arange(101), self.values)).astype(np.int64)


def percentile_table(lengths: ArrayLike) -> tuple[int, ...]:
    """The 101 percentiles, 0 to 100, of recorded lengths, rounded to whole tokens.

    This is how the tables below were made; with the traces at hand they can be made again.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or not len(given) or not np.issubdtype(given.dtype, np.integer):
        raise InvalidArgument(
            f"percentile_table: expected a flat list of whole numbers, at least one; "
            f"got {given.dtype} of shape {given.shape}"
        )
    return tuple(int(value) for value in np.rint(np.percentile(given, np.arange(101))))


_AZURE = "Azure LLM inference trace 2023, conversation (Patel et al., Splitwise, ISCA 2024)"

# fmt: off
TABLES = {
    "sharegpt_prompt": PercentileTable(
        source="ShareGPT first turns, round(1.3 * words); counts published with the AVMP prototype (arXiv 2605.22416)",
        licence="counts only, published without text",
        requests=5000,
        values=(
            1, 1, 1, 1, 3, 3, 4, 4, 5, 5, 6, 6, 6, 8, 8,
            8, 9, 9, 9, 9, 10, 10, 10, 12, 12, 12, 12, 13, 13, 13,
            13, 14, 14, 14, 16, 16, 16, 17, 17, 17, 18, 18, 20, 20, 20,
            21, 21, 22, 23, 23, 25, 26, 26, 27, 29, 29, 30, 31, 32, 34,
            35, 38, 39, 40, 43, 45, 48, 51, 53, 56, 60, 64, 66, 70, 74,
            79, 84, 92, 98, 104, 113, 122, 131, 144, 157, 177, 202, 230, 256, 296,
            344, 389, 448, 528, 633, 794, 945, 1156, 1461, 2125, 6708,
        ),
    ),
    "azure_conv_prompt": PercentileTable(
        source=_AZURE,
        licence="CC-BY 4.0",
        requests=19366,
        values=(
            2, 29, 91, 161, 181, 181, 191, 197, 201, 203, 207, 212, 222, 242, 317,
            372, 375, 378, 381, 384, 387, 390, 392, 394, 395, 396, 398, 399, 400, 402,
            403, 405, 406, 408, 411, 414, 419, 424, 433, 456, 703, 863, 903, 946, 972,
            984, 994, 1002, 1009, 1014, 1020, 1025, 1031, 1036, 1041, 1045, 1050, 1055, 1060, 1065,
            1071, 1076, 1081, 1086, 1092, 1097, 1102, 1109, 1116, 1122, 1130, 1139, 1147, 1159, 1171,
            1189, 1214, 1249, 1311, 1314, 1315, 1321, 1368, 1508, 1689, 1876, 2032, 2221, 2401, 2584,
            2734, 3291, 4073, 4076, 4079, 4083, 4086, 4090, 4098, 4142, 14050,
        ),
    ),
    "azure_conv_output": PercentileTable(
        source=_AZURE,
        licence="CC-BY 4.0",
        requests=19366,
        values=(
            7, 16, 24, 32, 38, 41, 44, 47, 49, 52, 54, 57, 59, 62, 64,
            67, 69, 71, 73, 75, 77, 79, 81, 82, 84, 85, 86, 87, 89, 90,
            91, 92, 93, 94, 95, 96, 97, 99, 100, 101, 103, 105, 107, 108, 110,
            113, 116, 118, 122, 125, 129, 133, 137, 141, 145, 151, 156, 161, 163, 169,
            177, 182, 190, 202, 216, 217, 237, 371, 375, 378, 384, 387, 390, 393, 394,
            395, 396, 396, 397, 398, 400, 402, 404, 407, 410, 411, 414, 415, 417, 420,
            424, 428, 429, 433, 442, 451, 468, 509, 540, 601, 1000,
        ),
    ),
}
# fmt: on
