"""Draw the tokens of rows from the scores of a model, one batch after another or with rows that come and go."""
