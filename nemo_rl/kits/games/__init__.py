"""Games as environments of many turns: the sliding puzzle, Blackjack, and the base class for further games."""
