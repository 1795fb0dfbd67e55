"""Attention for all backends: `plan` describes which keys a query sees, and `kernels` computes the attention."""

from nemo_rl.models.attention.kernels import attend
from nemo_rl.models.attention.plan import AttentionPlan, PackedRow, Piece, Scoring, plan_of_row

__all__ = ["AttentionPlan", "PackedRow", "Piece", "Scoring", "attend", "plan_of_row"]
