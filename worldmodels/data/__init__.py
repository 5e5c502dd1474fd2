"""What world models learn from: transitions, sequences, and statistics read off them."""
