"""Grading of answers in killable processes; nothing in this folder needs torch or ray."""
