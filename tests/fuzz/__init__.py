"""Damaged input without end: `python -m tests.fuzz` changes good files at random and hands them to irpar."""
