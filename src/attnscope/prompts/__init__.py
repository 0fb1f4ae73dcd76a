"""Where prompts come from, and what is inserted into them."""
