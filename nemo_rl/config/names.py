"""Names that configurations may use for data sets, known without importing the code behind them.

The data room registers its builders under exactly these names. Law: plain tuples, nothing imported.
"""

ARITHMETIC = "arithmetic"

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
    "ResponseDataset",
    ARITHMETIC,
)
"""Built-in response data sets; `ResponseDataset` reads `data_path`, a dotted path is a user's class."""
