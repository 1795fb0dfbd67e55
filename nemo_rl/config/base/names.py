"""Lists the names of data sets for configurations, without importing the code of the data sets.

`nemo_rl.data` registers its builders under exactly these names. Invariant: this module holds plain data and imports
nothing.
"""

ARITHMETIC = "arithmetic"
ARITHMETIC_SFT = "arithmetic_sft"
ARITHMETIC_PREFERENCE = "arithmetic_preference"
EPISODES = "episodes"
PLAIN_TEXT = "arrow_text"
NEMO_GYM_ROWS = "NemoGymDataset"
ARITHMETIC_PRODUCTS = "arithmetic_products"
GENERATED_DATASETS = {
    ARITHMETIC: "ResponseDataset",
    ARITHMETIC_PRODUCTS: "ResponseDataset",
    ARITHMETIC_SFT: "openai_format",
    ARITHMETIC_PREFERENCE: "BinaryPreferenceDataset",
}
"""Data sets that generate their rows, each with the data set that reads rows of the same kind from `data_path`."""

RESPONSE_DATASET_NAMES: tuple[str, ...] = (
    "OpenMathInstruct-2",
    "DeepScaler",
    "DAPOMath17K",
    "DAPOMathAIME2024",
    "AIME2024",
    "AIME2025",
    "AIME2026",
    "gsm8k",
    "GSM8K",
    "NuminaMath-1.5",
    "OpenR1-Math-220k",
    "squad",
    "tulu3_sft_mixture",
    "open_assistant",
    "openai_format",
    PLAIN_TEXT,
    "humaneval",
    "mbpp",
    "code_contests",
    "CodeDataset",
    "ResponseDataset",
    ARITHMETIC,
    ARITHMETIC_PRODUCTS,
    ARITHMETIC_SFT,
    EPISODES,
    NEMO_GYM_ROWS,
)
"""Built-in response data sets; `ResponseDataset` reads `data_path`; a dotted path names a user's class."""

PREFERENCE_DATASET_NAMES: tuple[str, ...] = (
    "HelpSteer3",
    "Tulu3Preference",
    "BinaryPreferenceDataset",
    "PreferenceDataset",
    ARITHMETIC_PREFERENCE,
)
"""Built-in preference data sets; the generic ones read `data_path`."""

FEEDBACK_DATASET_NAMES: tuple[str, ...] = ("BinaryFeedbackDataset",)
"""Built-in data sets of single labelled answers, for KTO."""

PASS_K = "pass_k"

VALIDATION_METRICS: tuple[str, ...] = (
    "accuracy",
    "avg_length",
    "num_samples",
    "num_reward_errors",
    "truncation_rate",
    PASS_K,
)
"""Metrics of a validation that samples answers; pass_k with several answers per prompt."""

OVERRIDE_MARKER = "_override_"
"""Key of a mapping that replaces an inherited one as a whole."""

BUILT_IN_ENVIRONMENTS: tuple[str, ...] = (
    *("math", "math_default", "math_multi_reward", "code", "code_jaccard", "reward_model", "llm_judge"),
    *("sliding_puzzle_game", "blackjack", "gymnasium", "textarena", "reasoning_gym", "verifiers", "rag", "tools"),
    *("agent", "nemo_gym"),
)
"""Environments of the library, as `nemo_rl.environments` registers them."""

NOT_BUILT_ENVIRONMENTS: tuple[str, ...] = ("mmau", "vlm")
"""Environments of NeMo RL that do not exist here; a user's environment may have these names."""

NOT_BUILT_DATASETS: tuple[str, ...] = (
    *("HelpSteer3", "Nemotron-Cascade-2-SFT-Math", "audiomcq", "avqa"),
    *("clevr-cogent", "daily-omni", "general-conversation-jsonl", "geometry3k", "intent-bench", "intent-train"),
    *("mmau", "mmpr-tiny", "refcoco"),
)
"""Data sets of NeMo RL that do not exist here, or not for every algorithm."""
