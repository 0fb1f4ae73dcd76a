"""Makes the card of a model: one page and one JSON file about its attention on fixed texts."""
