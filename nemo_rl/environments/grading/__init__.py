"""Grading of answers in killable processes, without torch and ray."""
