"""What models of images share: decoding, and reading states off frames."""
