"""Small scripted controllers for outside environments, given to the command line by their dotted path."""
