"""Scripted controllers for external environments; pass them to the command line by import path."""
