"""Learning from decisions in the world by critics: an agent acts itself, or steers a frozen policy's noise."""
