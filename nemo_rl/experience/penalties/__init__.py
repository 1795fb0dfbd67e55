"""Review of finished answers: which penalties apply to which turn, and how much was thought."""
