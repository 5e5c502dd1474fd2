"""Claims that are checked: each file holds one, its settings, its measurement and its tables (README.md)."""
