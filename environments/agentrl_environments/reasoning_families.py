"""Which families of reasoning-gym are kept, and why the others are not.

Audited with reasoning-gym 0.1.25 (Apache-2.0): tests/contract/test_reasoning.py does it again.
"""

from collections.abc import Mapping
from types import MappingProxyType

_CODE = "its scorer runs the answer as code"
_GOLD = "it has no answer of its own that scores full"
_HEDGE = "its scorer takes a hedge: several answers in one, text around it, or a prefix"
_LOOSE = "its scorer takes wrong numbers that are near, or rounded"
_SLOW = "it takes seconds to load or to generate"

LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration",
             "n_queens", "number_sorting", "polynomial_multiplication", "puzzle24",
             "simple_integration", "spiral_matrix", "string_insertion"),
            _CODE,
        ),
        **dict.fromkeys(
            ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"), _GOLD
        ),
        **dict.fromkeys(
            ("coin_flip", "fraction_simplification", "gsm_symbolic", "kakurasu", "knights_knaves",
             "letter_jumble", "quantum_lock", "sokoban", "spell_backward", "survo",
             "time_intervals", "word_sorting"),
            _HEDGE,
        ),
        **dict.fromkeys(
            ("advanced_geometry", "decimal_arithmetic", "polynomial_equations", "power_function"),
            _LOOSE,
        ),
        "complex_arithmetic": "its scorer takes NaN",
        "game_of_life_halting": "its scorer takes anything",
        **dict.fromkeys(("codeio", "list_functions"), "it is not the same each time"),
        **dict.fromkeys(
            ("acre", "arc_agi", "figlet_font", "group_anagrams", "knight_swap"), _SLOW
        ),
        "composite": "it is a mixture of the others",
    }
)  # fmt: skip

FAMILIES: tuple[str, ...] = (
    "ab", "aiw", "arc_1d", "base_conversion", "basic_arithmetic", "bf", "binary_alternation",
    "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic", "color_cube_rotation",
    "count_bits", "count_primes", "course_schedule", "cryptarithm", "decimal_chain_sum", "dice",
    "emoji_mystery", "family_relationships", "futoshiki", "game_of_life", "gcd",
    "isomorphic_strings", "jugs", "largest_island", "lcm", "leg_counting", "letter_counting",
    "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid",
    "needle_haystack", "number_filtering", "number_format", "number_sequence",
    "palindrome_generation", "palindrome_partitioning", "path_star", "pool_matrix",
    "prime_factorization", "products", "ransom_note", "rearc", "rectangle_count",
    "rotate_matrix", "rotten_oranges", "self_reference", "sentence_reordering", "shortest_path",
    "simple_equations", "simple_geometry", "string_manipulation", "string_splitting",
    "string_synthesis", "sudoku", "syllogism", "tower_of_hanoi", "tsumego", "word_ladder",
    "word_sequence_reversal", "zebra_puzzles",
)  # fmt: skip
