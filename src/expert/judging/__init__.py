"""Scores answers: test cases, a judge for each type of answer, the quality gate."""
