"""Does it answer right? Models on tasks with exact answers, under conditions, paired by problem."""
