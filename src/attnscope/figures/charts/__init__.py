"""Charts: tables in, altair out. Nothing here knows runs, measures or words about them."""
