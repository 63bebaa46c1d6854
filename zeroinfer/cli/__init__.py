"""Verbs of the command line, their output and exit codes; the only package that prints."""

from zeroinfer.cli.app import VERBS, main

__all__ = ["VERBS", "main"]
