"""Speed side by side: each benchmark interleaves our engine with what others ship, in one process."""
