"""What the programs beside this one make of figures: python3 -m unittest discover -s benches/peers"""

import copy
import unittest

import forms
import tables


def report(median_us: float, counts: list[int]) -> dict:
    row = {
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
    "lines": [{"form": "one hot", "mean": 256, "counts": [500, 12]}],
    "before": report(100.0, [500, 12]),
    "after": report(110.0, [500, 12]),
    "quantised": report(104.0, [500, 12]),
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
        losing["quantised"]["rows"][0]["median_us"] = 120.0
        text = tables.of_layer(losing)
        self.assertIn("| **1.10** |", text)
        self.assertIn("- Behind a peer: one hot 256 (1.10).", text)
        self.assertIn("dearer: one hot 256 (1.20).", text)

    def test_a_run_that_was_cut_off_has_its_table(self) -> None:
        cut_off = {key: value for key, value in LAYER.items() if key != "after"}
        self.assertIn("| one hot | 256 | 2 | 100 | 90.0 | 80.0 | memory | 0.80 |", tables.of_layer(cut_off))

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


class Forms(unittest.TestCase):
    def test_every_form_has_all_rows(self) -> None:
        for form in forms.SKEWED:
            for num_experts, mean in ((3, 1), (56, 16), (448, 64)):
                line = forms.skewed(form, num_experts, mean)
                self.assertEqual((len(line.counts), sum(line.counts)), (num_experts, num_experts * mean), form)

    def test_forms_are_what_they_say(self) -> None:
        hot = forms.skewed("one hot", 56, 64).counts
        self.assertEqual((hot[28], {*hot[:28], *hot[29:]}), (56 * 32, {32, 33}))
        self.assertEqual(forms.skewed("third empty", 9, 4).counts, [6, 6, 0, 6, 6, 0, 6, 6, 0])
        uneven = forms.skewed("log-normal", 56, 64).counts
        self.assertTrue(max(uneven) > 192 and min(uneven) < 16, uneven)
        self.assertTrue(any(count % 8 for count in forms.skewed("ragged", 56, 64).counts))


if __name__ == "__main__":
    unittest.main()
