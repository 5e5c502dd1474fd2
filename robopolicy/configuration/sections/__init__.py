"""The configuration sections by purpose: fields are settings, the docstrings below them their help."""
