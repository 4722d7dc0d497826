"""Published measurements of collectives and steps, predicted from stated hardware."""
