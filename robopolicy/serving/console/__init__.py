"""Console: the web page from which people watch robots, take them over and stop them."""
