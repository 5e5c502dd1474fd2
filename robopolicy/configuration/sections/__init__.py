"""The sections of the configuration, by what they are for: fields are settings, docstrings below them their help."""
