"""python3 -m unittest discover -s benches/peers"""

import copy
import unittest

import tables


def report(median_us: float, counts: list[int]) -> dict:
    row = {
        "form": "one_hot",
        "rows_per_expert": 256,
        "counts": counts,
        "num_experts_hit": 2,
        "median_us": median_us,
        "min_us": 90.0,
        "floor_us": 80.0,
        "memory_floor_us": 80.0,
        "flops_floor_us": 40.0,
    }
    return {"ceilings": {"read_tbyte_per_s": 4.5, "dense_tflops": 730.0}, "rows": [row]}


LAYER = {
    "name": "k3-ep16",
    "geometry": {"num_experts": 2, "hidden": 64, "intermediate": 32},
    "command": "moe_peers.py",
    "versions": {"gpu": "NVIDIA H200"},
    "before": [report(100.0, [500, 12])],
    "after": [report(110.0, [500, 12])],
    "quantised": [report(104.0, [500, 12])],
    "peers": [
        {
            "counts": [500, 12],
            "peers": {"torch bf16": {"median_us": 300.0}, "humming": {"median_us": 125.0}},
            "dense_tflops": 720.0,
        }
    ],
}
TRAVEL = {
    "name": "kimi-k3 bf16",
    "command": "two_ranks.py",
    "versions": {"gpu": "NVIDIA H200"},
    "before": {
        "rows": [
            {"transport": "nccl", "tokens": 8, "dispatch_us": 70.0, "combine_us": 50.0},
            {"transport": "nvlink", "tokens": 8, "dispatch_us": 40.0, "combine_us": 20.0},
        ]
    },
    "after": {
        "rows": [
            {"transport": "nccl", "tokens": 8, "dispatch_us": 75.0, "combine_us": 50.0},
            {"transport": "nvlink", "tokens": 8, "dispatch_us": 30.0, "combine_us": 20.0},
        ]
    },
    "torch": [{"tokens": 8, "dispatch_us": 200.0, "combine_us": 15.0}],
    "layer": {"rows": [{"median_us": 100.0}]},
    "peers": [{"peers": {"torch bf16": {"median_us": 300.0}, "humming": {"median_us": 125.0}}}],
}


class Layer(unittest.TestCase):
    def test_the_slower_of_ours_is_compared_with_the_best_peer(self) -> None:
        text = tables.of_layer(LAYER)
        self.assertIn("| one hot | 256 | 2 | 100 | 110 | 90.0 | 80.0 | memory | 0.73 | 104 | 300 | 125 | 720 | 0.88 |", text)
        self.assertIn("- Behind a peer: none.", text)
        self.assertIn("- More than 15 % over the floor: one hot 256 (0.73).", text)
        self.assertIn("dearer: none.", text)

    def test_lines_that_lose_stand_out(self) -> None:
        losing = copy.deepcopy(LAYER)
        losing["peers"][0]["peers"]["humming"]["median_us"] = 100.0
        losing["quantised"][0]["rows"][0]["median_us"] = 120.0
        text = tables.of_layer(losing)
        self.assertIn("| **1.10** |", text)
        self.assertIn("- Behind a peer: one hot 256.", text)
        self.assertIn("dearer: one hot 256 (1.09).", text)

    def test_other_rows_are_refused(self) -> None:
        other = copy.deepcopy(LAYER)
        other["peers"][0]["counts"] = [501, 11]
        with self.assertRaisesRegex(ValueError, "one hot 256"):
            tables.of_layer(other)


class Travel(unittest.TestCase):
    def test_phases_that_lose_are_named(self) -> None:
        text = tables.of_travel(TRAVEL)
        self.assertIn("| 8 | 75.0 | 40.0 | 200 | 100 | 300 | 125 | 50.0 | 20.0 | 15.0 | 0.47 |", text)
        self.assertIn("- Behind in combine, tokens a rank: 8.", text)
        self.assertIn("- Behind in dispatch, tokens a rank: none.", text)


if __name__ == "__main__":
    unittest.main()
