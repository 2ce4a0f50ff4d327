"""With which two numbers the terms of the objective are weighed in each iteration."""
